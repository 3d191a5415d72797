# type: ignore
# The line above: a checker of types takes the kernels for Python, and Triton need not be installed.
"""Masks that are 2:4 along both axes, searched in Triton: each lane has a tile of 4 x 4 and its 90 masks in registers.

The order of sums and of comparisons is that of `transposable.project_tiles_reference`, so the choice is the same among
equals. A mask is a number of 16 bits: bit 4 * row + column.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twofour.patterns.nm_mask_triton import apart, together

BLOCK = 128
"""Tiles that one program searches, side by side."""


@triton.jit
def _pairs(a, b, c, d):
    """Return what each of the six pairs of columns keeps of a row, in the order of `transposable.PAIRS`."""
    return a + b, a + c, a + d, b + c, b + d, c + d


@triton.jit
def _row(scores, at, inside, ABSOLUTE: tl.constexpr, TILES: tl.constexpr):
    x = tl.load(scores + at, mask=inside, other=0).to(tl.float32)
    if ABSOLUTE:
        x = tl.abs(x)
    a, b, c, d = apart(x, TILES)
    return a, b, c, d


@triton.jit
def _code(P: tl.constexpr):
    """Return the four bits of a pair of columns: 0b0011, 0b0101, 0b1001, 0b0110, 0b1010, 0b1100."""
    return (0xCA6953 >> (4 * P)) & 15


@triton.jit
def _better(value, chosen, other, way):
    return tl.maximum(value, other), tl.where(other > value, way, chosen)


@triton.jit
def _search(r0, r1, r2, r3):
    """Return the best mask of each tile from the six sums of `_pairs` of each of its four rows."""
    value = (r0[0] + r1[0]) + (r2[5] + r3[5])
    chosen = tl.full(value.shape, _code(0) * 0x11 + _code(5) * 0x1100, tl.int32)
    for p in tl.static_range(1, 6):  # both upper rows keep one pair, both lower ones the other
        way = _code(p) * 0x11 + _code(5 - p) * 0x1100
        value, chosen = _better(value, chosen, (r0[p] + r1[p]) + (r2[5 - p] + r3[5 - p]), way)
    above, upper = r0[0] + r1[5], tl.full(value.shape, _code(0) + _code(5) * 16, tl.int32)
    below, lower = r2[0] + r3[5], tl.full(value.shape, _code(0) + _code(5) * 16, tl.int32)
    for p in tl.static_range(1, 6):  # the two rows of either half complete each other
        above, upper = _better(above, upper, r0[p] + r1[5 - p], _code(p) + _code(5 - p) * 16)
        below, lower = _better(below, lower, r2[p] + r3[5 - p], _code(p) + _code(5 - p) * 16)
    value, chosen = _better(value, chosen, above + below, upper + lower * 256)
    for p in tl.static_range(0, 6):
        for q in tl.static_range(0, 6):
            if p < q and p + q != 5:
                above, upper = r0[p] + r1[q], tl.full(value.shape, _code(p) + _code(q) * 16, tl.int32)
                above, upper = _better(above, upper, r0[q] + r1[p], _code(q) + _code(p) * 16)
                below = r2[5 - p] + r3[5 - q]
                lower = tl.full(value.shape, _code(5 - p) + _code(5 - q) * 16, tl.int32)
                below, lower = _better(below, lower, r2[5 - q] + r3[5 - p], _code(5 - q) + _code(5 - p) * 16)
                value, chosen = _better(value, chosen, above + below, upper + lower * 256)
    return chosen


@triton.jit
def _tiles(scores, keep, columns, ABSOLUTE: tl.constexpr, TILES: tl.constexpr):
    at = tl.program_id(0) * (4 * TILES) + tl.arange(0, 4 * TILES)
    inside = at < columns
    first = tl.program_id(1).to(tl.int64) * 4 * columns + at
    a, b, c, d = _row(scores, first, inside, ABSOLUTE, TILES)
    r0 = _pairs(a, b, c, d)
    a, b, c, d = _row(scores, first + columns, inside, ABSOLUTE, TILES)
    r1 = _pairs(a, b, c, d)
    a, b, c, d = _row(scores, first + 2 * columns, inside, ABSOLUTE, TILES)
    r2 = _pairs(a, b, c, d)
    a, b, c, d = _row(scores, first + 3 * columns, inside, ABSOLUTE, TILES)
    r3 = _pairs(a, b, c, d)
    chosen = _search(r0, r1, r2, r3)
    for row in tl.static_range(4):
        bits = chosen >> (4 * row)
        found = together(bits & 1, (bits >> 1) & 1, (bits >> 2) & 1, (bits >> 3) & 1, TILES)
        tl.store(keep + first + row * columns, found.to(tl.int8), mask=inside)


def tiles(scores: Tensor, *, absolute: bool) -> Tensor:
    """Return the transposable 2:4 mask of scores, as `Transposable.project` does.

    Args:
        scores: float32, bfloat16 or float16 (out, ..., in), out and in multiples of 4, on a GPU. What is not finite is
            not refused: the choice in its tile is then any legal one.
        absolute: Rank by |scores|.

    Returns:
        bool, the scores' shape.
    """
    scores = scores.contiguous()
    keep = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    if scores.numel():
        columns = scores.numel() // len(scores)
        grid = (triton.cdiv(columns, 4 * BLOCK), len(scores) // 4)
        _tiles[grid](scores, keep.view(torch.int8), columns, absolute, BLOCK)
    return keep
