"""What N:M and its pair-wise form share: the ranking of a group in plain torch, and the count of the legal groups."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.errors import PatternError
from twofour.patterns.base import Conformity, first_true, non_finite, numbers
from twofour.shapes import Bool, Real, Shaped

LARGEST_GROUP = 64
"""Largest M: the native kernel ranks a group in registers and on the stack."""


def require_possible(name: str, n: object, m: object, unit: int) -> None:
    """Refuse an N:M that keeps nothing or everything, is too large, or cuts a unit of `unit` values in two.

    Raises:
        PatternError: Not unit <= n < m <= 64, or `n` or `m` is no whole multiple of `unit`.
    """
    possible = (
        isinstance(n, int) and isinstance(m, int) and n % unit == m % unit == 0 and unit <= n < m <= LARGEST_GROUP
    )
    if not possible:
        raise PatternError(
            f"the pattern {name!r} is impossible",
            got=f"N = {n}, M = {m}",
            wanted=f"{'even N and M with ' if unit == 2 else ''}{unit} <= N < M <= {LARGEST_GROUP}",
            remedy='"4:8-pairs"' if unit == 2 else '"2:4": N of every M values are kept',
        )


def project_reference(
    scores: Real[Tensor, "*rows reduction"], n: int, m: int, *, absolute: bool = False
) -> Bool[Tensor, "*rows reduction"]:
    """Keep the `n` largest of every `m` scores in plain torch: the reference of the native kernels, any device.

    Args:
        scores: Real scores (..., in), `in` a multiple of `m`.
        n: Kept values per group.
        m: Values per group.
        absolute: Rank by |scores|.

    Raises:
        PatternError: A score is NaN or infinite.
    """
    if scores.is_floating_point() and not torch.isfinite(scores).all():
        raise non_finite("a tensor of scores", scores)
    groups = torch.unflatten(scores, -1, (-1, m))
    # A stable descending sort puts the lowest index first among equals; integers widen so that |-128| is 128.
    groups = groups.to(torch.int64 if not scores.is_floating_point() else scores.dtype)
    best = (groups.abs() if absolute else groups).sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return torch.zeros(groups.shape, dtype=torch.bool, device=scores.device).scatter_(-1, best, True).flatten(-2)


def check_groups(
    nonzero: Bool[Tensor, "*rows groups units"], allowed: int, weight: Shaped[Tensor, "*rows reduction"], group: int
) -> Conformity:
    """Count the legal groups of `nonzero` (..., groups, m) and find the first offending one in `weight`."""
    counts = nonzero.sum(-1, dtype=torch.uint8 if nonzero.shape[-1] < 256 else torch.int32)
    legal = counts <= allowed
    good = int(legal.sum())
    if good == legal.numel():
        return Conformity(legal.numel(), good)
    *rows, index = first_true(~legal)
    values = weight.detach()[tuple(rows)][index * group : (index + 1) * group]
    return Conformity(legal.numel(), good, (*rows, index * group), numbers(values))
