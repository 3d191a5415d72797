# type: ignore
# The line above: a checker of types takes the kernels for Python, and Triton need not be installed.
"""Dense weight -> 2:4 mask, kept values and their positions in one pass over memory, in Triton.

A program holds a tile of the weight once: it ranks each group of four, and writes the mask, the two kept values and the
four bits that name their places. Positions come in one of two orders:

* canonical: two groups a byte along a row, as files and `few_tokens` have them (docs/formats.md);
* "cutlass": four groups an int16, rows and columns shuffled as torch's CUTLASS kernels read them (Ampere's `mma.sp`).

`reference.py` says the same in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twofour.errors import KernelError
from twofour.native import gpu
from twofour.patterns.nm_mask_triton import rank, two_largest

ROWS, GROUPS = 16, 64
"""Tile of one program: rows, and groups of four along them."""


@dataclass(frozen=True, eq=False)
class Compressed:
    """A 2:4 weight on the device.

    Attributes:
        values: (rows, columns / 2), the kept values in order.
        codes: uint8 (rows, ceil(columns / 8)) in canonical order, or int16 (rows, columns / 16) in CUTLASS's.
        mask: bool (rows, columns), or None where none was asked for.
    """

    values: Tensor
    codes: Tensor
    mask: Tensor | None


@triton.jit
def _four(x, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, (ROWS, GROUPS, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _two(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    return tl.split(tl.reshape(x, (ROWS, HALF, 2)))


@triton.jit
def _shuffled(row, column, rows):
    """Return where CUTLASS has the int16 of (row, column): rows in 32s, 2 x 2 blocks turned, columns in pairs."""
    row = row // 32 * 32 + (row % 8) * 4 + (row % 32) // 8
    turn = (column % 2) - (row % 2)  # 1 above the diagonal of a 2 x 2 block, -1 below it
    row, column = row + turn, column - turn
    return column // 2 * rows * 2 + row * 2 + column % 2


@triton.jit
def _store_codes(codes, code, row, rows, columns, CUTLASS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Write the four bits of each group of a tile in canonical or in CUTLASS's order."""
    inside = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[None, :] < columns // 4
    low, high = _two(tl.where(inside, code, 0), ROWS, GROUPS // 2)
    if CUTLASS:
        low, high = _two(low | (high << 4), ROWS, GROUPS // 4)
        word = tl.program_id(0) * (GROUPS // 4) + tl.arange(0, GROUPS // 4)[None, :]
        at = _shuffled(row, word, rows)
        tl.store(codes + at, (low | (high << 8)).to(tl.int16), mask=(row < rows) & (word < columns // 16))
    else:
        length = (columns // 4 + 1) // 2
        byte = tl.program_id(0) * (GROUPS // 2) + tl.arange(0, GROUPS // 2)[None, :]
        tl.store(codes + row * length + byte, (low | (high << 4)).to(tl.uint8), mask=(row < rows) & (byte < length))


@triton.jit
def _compress(
    weight, given, values, codes, mask, rows, columns, along_rows, along_columns,
    GIVEN: tl.constexpr, MASK: tl.constexpr, CUTLASS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * (4 * GROUPS) + tl.arange(0, 4 * GROUPS)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(weight + row * along_rows + column * along_columns, mask=inside, other=0)
    if GIVEN:
        kept = tl.load(given + row * along_rows + column * along_columns, mask=inside, other=0) != 0
        x = tl.where(kept, x, 0)
        w0, w1, w2, w3 = _four(kept.to(tl.int32), ROWS, GROUPS)
    else:
        w0, w1, w2, w3 = _four(rank(x, True), ROWS, GROUPS)
    k0, k1, k2, k3 = two_largest(w0, w1, w2, w3)
    w0, w1, w2, w3 = _four(x.to(values.dtype.element_ty), ROWS, GROUPS)
    first = tl.where(k0, w0, tl.where(k1, w1, w2))
    second = tl.where(k3, w3, tl.where(k2, w2, w1))
    half = tl.program_id(0) * (2 * GROUPS) + tl.arange(0, 2 * GROUPS)[None, :]
    found = tl.reshape(tl.join(first, second), (ROWS, 2 * GROUPS))
    tl.store(values + row * (columns // 2) + half, found, mask=(row < rows) & (half < columns // 2))
    zero = tl.zeros(k0.shape, tl.int32)
    code = tl.where(k0, zero, tl.where(k1, zero + 1, zero + 2))
    code += tl.where(k3, zero + 12, tl.where(k2, zero + 8, zero + 4))
    _store_codes(codes, code, row, rows, columns, CUTLASS, ROWS, GROUPS)
    if MASK:
        even = tl.join(tl.join(k0.to(tl.int8), k2.to(tl.int8)), tl.join(k1.to(tl.int8), k3.to(tl.int8)))
        tl.store(mask + row * columns + column, tl.reshape(even, (ROWS, 4 * GROUPS)), mask=inside)


def compress(
    weight: Tensor,
    keep: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    cutlass: bool = False,
    mask: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Compressed:
    """Prune a weight 2:4 by magnitude, or by a mask, and write it packed.

    Args:
        weight: (rows, columns) on a GPU: float32, bfloat16 or float16, any strides (a transpose is read in place);
            columns a multiple of 4, with `cutlass` rows one of 32 and columns one of 64.
        keep: bool, the weight's shape and strides, at most two of each four; None: the two largest magnitudes, the
            first among equals. What is not finite counts as largest, so that a loss scaler gets to see it.
        dtype: Of the values; default the weight's.
        cutlass: Write positions in CUTLASS's order; bfloat16 and float16 values alone.
        mask: Return the mask, too.
        out: Values and codes of an earlier call with the same sizes, to be written anew.

    Raises:
        KernelError: The weight is on no GPU that Triton runs on.
    """
    if not gpu.runs(weight):
        raise KernelError(
            "a weight is compressed on a GPU",
            got=f"a tensor on {weight.device.type}: {gpu.unavailable(triton=True) or 'Triton runs on GPUs'}",
            wanted="a tensor on an NVIDIA GPU, with the package triton",
            remedy='twofour.packing.pack(weight, "2:4") packs on the CPU',
        )
    rows, columns = weight.shape
    held = dtype or weight.dtype
    assert columns % 4 == 0, tuple(weight.shape)
    assert not cutlass or (rows % 32 == 0 and columns % 64 == 0 and held.itemsize == 2), (tuple(weight.shape), held)
    assert keep is None or keep.shape == weight.shape, (keep.shape, weight.shape)
    if keep is not None and keep.stride() != weight.stride():
        weight, keep = weight.contiguous(), keep.contiguous()
    device = weight.device
    shape, kind = ((rows, columns // 16), torch.int16) if cutlass else ((rows, (columns // 4 + 1) // 2), torch.uint8)
    if out is None:
        out = torch.empty(rows, columns // 2, dtype=held, device=device), torch.empty(shape, dtype=kind, device=device)
    values, codes = out
    assert (values.shape, values.dtype) == ((rows, columns // 2), held), (values.shape, values.dtype)
    assert (codes.shape, codes.dtype) == (shape, kind), (codes.shape, codes.dtype)
    found = torch.empty(rows, columns, dtype=torch.bool, device=device) if mask else None
    if weight.numel():
        grid = (triton.cdiv(columns, 4 * GROUPS), triton.cdiv(rows, ROWS))
        given = weight if keep is None else keep.view(torch.int8)
        kept = weight if found is None else found.view(torch.int8)
        strides = weight.stride()
        flags = keep is not None, mask, cutlass
        _compress[grid](weight, given, values, codes, kept, rows, columns, *strides, *flags, ROWS, GROUPS)
    return Compressed(values, codes, found)
