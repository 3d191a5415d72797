"""The unbiased 2:4 estimate in plain torch: what every fast kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.shapes import Float32, Real

_32_BITS = 0xFFFFFFFF
_TINY = torch.finfo(torch.float32).tiny


def uniform(
    groups: int, columns: int, seed: int, device: torch.device | None = None
) -> Float32[Tensor, "{groups} {columns}"]:
    """Return the uniform numbers of the estimate, float32 (groups, columns) in [0, 1): 24 bits of a hash of the place.

    The hash is the finaliser of MurmurHash3.
    """
    x = (torch.arange(groups * columns, dtype=torch.int64, device=device) * 0x9E3779B1 + seed) & _32_BITS
    x = ((x ^ x >> 16) * 0x85EBCA6B) & _32_BITS
    x = ((x ^ x >> 13) * 0xC2B2AE35) & _32_BITS
    x = x ^ x >> 16
    return (x >> 8).float().mul(2**-24).view(groups, columns)


def nm_unbiased_reference(gradient: Real[Tensor, "tokens columns"], seed: int) -> Float32[Tensor, "tokens columns"]:
    """Return an estimate with two values in every four tokens whose expectation is the gradient.

    Args:
        gradient: Real (tokens, columns) on any device, tokens a multiple of 4.
        seed: 32 bits.

    Returns:
        float32 (tokens, columns); the formulas stand in README.md.
    """
    x = torch.movedim(gradient.float().view(-1, 4, gradient.shape[1]), 1, 0)  # (4, groups, columns)
    a = x.abs()
    ab, cd = a[0] + a[1], a[2] + a[3]
    rest = torch.stack((a[1] + cd, a[0] + cd, ab + a[3], ab + a[2])).amin(0)
    half = torch.minimum((ab + cd) * 0.5, rest)
    w = torch.minimum(a, half.clamp(min=_TINY))
    sums = torch.stack((w[0], w[0] + w[1], w[0] + w[1] + w[2]))
    at = uniform(len(gradient) // 4, gradient.shape[1], seed, gradient.device) * half
    first = (sums <= at).sum(0).clamp(max=2)
    second = torch.maximum((sums - half <= at).sum(0), first + 1)
    place = torch.arange(4, device=gradient.device).view(4, 1, 1)
    kept = (place == first) | (place == second)
    value = torch.where(a == 0, 0.0, torch.maximum(a, half).copysign(x))
    return torch.where(kept, value, 0.0).movedim(0, 1).flatten(0, 1)
