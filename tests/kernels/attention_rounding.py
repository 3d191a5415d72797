"""How far float32 moves the gradients of attention: first-order propagation of each rounding, by its own terms' sizes.

With S = scale Q K^T + mask, P = softmax S, dP = dO V^T, D = sum P dP over keys, dS = P (dP - D) and dQ = scale dS K, a
gradient may be far smaller than the terms that cancel in it, and what these were rounded by stays. A sum of n terms t
rounds what it has by then n times, of which the square is that of the terms so far where signs are random: with
u = 2^-24, n u^2 sum t^2 bounds its variance. That of S and dP passes on by the derivatives, in which much cancels:

    d dQ / d dP_l = scale P_l (K_l - P K)        d dQ / d S_l = scale (dS_l (K_l - P K) - P_l dS K)

P itself is rounded, each weight by a few u of itself and a row by its divisor, and so is D: nothing cancels these, as
P's rows then no longer sum to one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.kernels.attention.reference import drop_below, kept_by_dropout

UNIT = 2.0**-48
"""The square of what one rounding moves a number by at most, for each of it."""

OF_WEIGHT = 16 * UNIT
"""Of a weight: the exponential's argument, its polynomial, the division and the product with what dropout keeps."""


@dataclass(frozen=True)
class Terms:
    """What the gradients are made of, in float64, and the variances of S, dP, D and each row's divisor."""

    p: Tensor
    kept: Tensor
    d_p: Tensor
    d: Tensor
    d_s: Tensor
    of_s: Tensor
    of_d_p: Tensor
    of_d: Tensor
    of_row: Tensor


def terms(
    q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, mask: Tensor | None, scale: float, causal: bool, drop: Tensor
) -> Terms:
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    p, keys = scores.softmax(-1).nan_to_num(0), k.shape[-2]
    d_p = upstream @ v.mT * drop
    d = (p * d_p).sum(-1, keepdim=True)
    of_s = UNIT * (q.shape[-1] * scale**2 * (q**2 @ k.mT**2) + scores.masked_fill(scores.isneginf(), 0) ** 2)
    of_d_p = UNIT * v.shape[-1] * (upstream**2 @ v.mT**2) * drop**2
    of_d = UNIT * keys * ((p * d_p) ** 2).sum(-1, keepdim=True)
    of_row = UNIT * (2 + keys * (p**2).sum(-1, keepdim=True))
    return Terms(p, drop, d_p, d, p * (d_p - d), of_s, of_d_p, of_d, of_row)


def of_queries(t: Terms, k: Tensor, scale: float) -> Tensor:
    """Return the variance of dQ: by its derivatives above, squared and summed over keys."""
    mean, whole = t.p @ k, t.d_s @ k

    def about_mean(weights: Tensor) -> Tensor:
        """Sum weights (K - P K)^2."""
        return weights @ k**2 - 2 * mean * (weights @ k) + weights.sum(-1, keepdim=True) * mean**2

    crossed, squared = t.of_s * t.d_s * t.p, (t.of_s * t.p**2).sum(-1, keepdim=True)
    found = about_mean(t.p**2 * t.of_d_p) + about_mean(t.of_s * t.d_s**2)
    found = found - 2 * whole * (crossed @ k - crossed.sum(-1, keepdim=True) * mean) + squared * whole**2
    share, both = t.p * t.d_p, t.d_s * t.p * t.d_p
    found = found + OF_WEIGHT * (t.d_s**2 @ k**2 - 2 * mean * (both @ k) + (share**2).sum(-1, keepdim=True) * mean**2)
    found = found + t.of_row * (whole - t.d * mean) ** 2 + t.of_d * mean**2
    return scale**2 * (found + UNIT * (2 + k.shape[-2]) * (t.d_s**2 @ k**2)).clamp(min=0)


def of_keys(t: Terms, q: Tensor, scale: float) -> Tensor:
    """Return the variance of dK: queries have no roundings in common."""
    a, b, c = ((t.of_s * one).sum(-1, keepdim=True) for one in (t.p**2, t.p * t.d_s, t.d_s**2))
    found = t.of_s * t.d_s**2 * (1 - 4 * t.p) + t.d_s**2 * a + 2 * t.p * t.d_s * b + t.p**2 * c
    found = found + t.p**2 * (t.of_d_p * (1 - 2 * t.p) + (t.p**2 * t.of_d_p).sum(-1, keepdim=True))
    share = ((t.p * t.d_p) ** 2).sum(-1, keepdim=True)
    found = found + OF_WEIGHT * (t.d_s**2 - 2 * t.p**2 * t.d_s * t.d_p + t.p**2 * share)
    found = found + t.of_row * (t.d_s - t.p * t.d) ** 2 + t.p**2 * t.of_d + UNIT * (2 + q.shape[-2]) * t.d_s**2
    return scale**2 * found.clamp(min=0).mT @ q**2


def of_values(t: Terms, upstream: Tensor) -> Tensor:
    """Return the variance of dV."""
    share = t.of_s * (1 - 2 * t.p) + (t.p**2 * t.of_s).sum(-1, keepdim=True)
    share = share.clamp(min=0) + OF_WEIGHT + t.of_row + UNIT * upstream.shape[-2]
    return ((t.p * t.kept) ** 2 * share).mT @ upstream**2


def deviations(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    upstream: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    causal: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return how far each number of dQ, dK and dV deviates at most; of float64 and of heads that none share."""
    below, shape = drop_below(dropout), (*q.shape[:-1], k.shape[-2])
    drop = kept_by_dropout(shape, below, seed).double() * (65536 / (65536 - below)) if below else torch.ones(())
    made = terms(q, k, v, upstream, mask, scale, causal, drop)
    found = of_queries(made, k, scale), of_keys(made, q, scale), of_values(made, upstream)
    return found[0].sqrt(), found[1].sqrt(), found[2].sqrt()
