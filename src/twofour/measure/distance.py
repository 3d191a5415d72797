"""How far the outputs of two ways to compute are apart, relative to their size; infinite where they cannot be compared.

NaN and infinities must stand where they are wanted and count as equal there; whole numbers must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NOISE = 1e-3
"""Size of an output, as a part of the largest output, below which its error is taken relative to that part."""


def distance(found: Sequence[Any], want: Sequence[Any]) -> float:
    """Return the largest ||found - want|| / ||want|| of output leaves, each norm the root of the mean square.

    A leaf smaller than `NOISE` of the largest one is compared with that, so that what cancels to nearly zero counts as
    zero.
    """
    return _apart(found, want, _root_mean_square, noise=NOISE)


def largest_difference(found: Sequence[Any], want: Sequence[Any], least: float = 0.0) -> float:
    """Return the largest difference of a value relative to the largest value of its output leaf.

    Args:
        found: Output leaves.
        want: The leaves that they should equal.
        least: A leaf whose largest value is smaller is compared with this.
    """
    return _apart(found, want, lambda leaf: float(leaf.abs().max()), least=least)


def is_real(leaf: Any) -> bool:
    """Tell whether an output is a tensor of rounded numbers, which no other engine computes to the last bit."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _apart(
    found: Sequence[Any],
    want: Sequence[Any],
    norm: Callable[[Tensor], float],
    *,
    noise: float = 0.0,
    least: float = 0.0,
) -> float:
    pairs = [
        (_as_real(got), _as_real(wanted)) for got, wanted in zip(found, want, strict=True) if isinstance(wanted, Tensor)
    ]
    if any(got.shape != wanted.shape or not (is_real(wanted) or torch.equal(got, wanted)) for got, wanted in pairs):
        return math.inf
    pairs = [(got, wanted) for got, wanted in pairs if is_real(wanted)]
    if not all(_finite_alike(got, wanted) for got, wanted in pairs):
        return math.inf
    finite = [(got[(at := wanted.isfinite())].double(), wanted[at].double()) for got, wanted in pairs]
    finite = [(got, wanted) for got, wanted in finite if wanted.numel()]
    sizes = [norm(wanted) for _, wanted in finite]
    least = max(least, noise * max(sizes, default=0.0))
    ratios = [norm(got - wanted) / (max(size, least) or 1.0) for (got, wanted), size in zip(finite, sizes, strict=True)]
    return max(ratios, default=0.0) if all(map(math.isfinite, ratios)) else math.inf


def _as_real(leaf: Tensor) -> Tensor:
    return torch.view_as_real(leaf) if leaf.is_complex() else leaf


def _root_mean_square(leaf: Tensor) -> float:
    return float(leaf.square().mean()) ** 0.5


def _finite_alike(got: Tensor, wanted: Tensor) -> bool:
    """Tell whether NaN, inf and -inf stand in the same places."""
    odd = [torch.where(leaf.isfinite(), 0.0, leaf.double()).nan_to_num(2.0, 1.0, -1.0) for leaf in (got, wanted)]
    return torch.equal(*odd)
