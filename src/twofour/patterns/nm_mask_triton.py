# type: ignore
# The line above: a checker of types takes the kernels for Python, and Triton need not be installed.
"""2:4 masks in Triton: the two largest of every four, NaN above all, the lowest index first among equals."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Groups of four that one program ranks."""


@triton.jit
def two_largest(a, b, c, d):
    """Return which of four magnitudes are kept; magnitudes are whole numbers, as `magnitude` makes them."""
    ab, ac, ad, bc, bd, cd = b > a, c > a, d > a, c > b, d > b, d > c
    one = tl.full(a.shape, 1, tl.int32)
    none = tl.full(a.shape, 0, tl.int32)
    first = tl.where(ab, one, none) + tl.where(ac, one, none) + tl.where(ad, one, none)
    second = tl.where(ab, none, one) + tl.where(bc, one, none) + tl.where(bd, one, none)
    third = tl.where(ac, none, one) + tl.where(bc, none, one) + tl.where(cd, one, none)
    fourth = tl.where(ad, none, one) + tl.where(bd, none, one) + tl.where(cd, none, one)
    return first < 2, second < 2, third < 2, fourth < 2


@triton.jit
def rank(x, ABSOLUTE: tl.constexpr):
    """Return whole numbers in the order of x as float32, of |x| with ABSOLUTE; NaN is above infinity."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    if ABSOLUTE:
        return size
    return tl.where((bits < 0) & (size <= 0x7F800000), -size, size)


@triton.jit
def apart(x, GROUPS: tl.constexpr):
    """Split (4 * GROUPS,) into what stands at the four places of each group."""
    even, odd = tl.split(tl.reshape(x, (GROUPS, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def together(a, b, c, d, GROUPS: tl.constexpr):
    """Return the inverse of `apart`."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (4 * GROUPS,))


@triton.jit
def _mask(scores, keep, count, ABSOLUTE: tl.constexpr, GROUPS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * (4 * GROUPS) + tl.arange(0, 4 * GROUPS)
    x = tl.load(scores + at, mask=at < count, other=0)
    a, b, c, d = apart(rank(x, ABSOLUTE), GROUPS)
    a, b, c, d = two_largest(a, b, c, d)
    found = together(a.to(tl.int8), b.to(tl.int8), c.to(tl.int8), d.to(tl.int8), GROUPS)
    tl.store(keep + at, found, mask=at < count)


def mask(scores: Tensor, *, absolute: bool) -> Tensor:
    """Return the 2:4 mask of scores, as `NM.project` does; scores that are not finite are ranked, not refused.

    Args:
        scores: float32, bfloat16 or float16 (..., in), `in` a multiple of 4, on a GPU.
        absolute: Rank by |scores|.

    Returns:
        bool, the scores' shape.
    """
    scores = scores.contiguous()
    keep = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    count = scores.numel()
    if count:
        _mask[(triton.cdiv(count, 4 * BLOCK),)](scores, keep.view(torch.int8), count, absolute, BLOCK)
    return keep
