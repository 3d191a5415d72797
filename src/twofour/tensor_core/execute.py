"""One sparse instruction on what its lanes hold: bit for bit in where values go, and in whole numbers.

What PTX ISA 9.0 says of the arithmetic (9.7.14.6.3, 9.7.15.5.2): products of f16, bf16, tf32 and 8-bit floats are
exact or at least float32; sums in f32 are "at least single precision", in f16 at least half; their order, their
rounding and what happens to subnormal inputs are unspecified, and PTX 9.2 adds that 8-bit floats are summed with less
than single precision by `wgmma`. So no result in floating point can be called the hardware's bits. Here products are
exact, sums run in float64 and are rounded once, to nearest even, into the accumulator; any hardware agrees wherever
every order of summing is exact. Whole numbers wrap modulo 2**32, or are clamped with `.satfinite`: those are the bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.tensor_core.element import Element, element
from twofour.tensor_core.fragments import a_values, b_bits, c_registers, c_values, metadata_codes
from twofour.tensor_core.instruction import Instruction
from twofour.tensor_core.operand import unit_positions

ACCUMULATORS = {"f32": torch.float32, "f16": torch.float16, "s32": torch.int32}
"""Type of C and D in PTX -> dtype of their matrices."""


def execute(
    row: Instruction,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    metadata: Tensor,
    *,
    selector: int = 0,
    b_type: str | Element | None = None,
    accumulator: str | None = None,
    ordered: bool = False,
    saturate: bool = False,
) -> Tensor:
    """Execute the instruction: D = A B + C, all of it as registers. Leading axes are instructions side by side.

    Args:
        row: What to execute.
        a: int32 (..., lanes, registers) of stored values. `wgmma.sp` also takes the tile that its descriptor points to:
            (..., 64, k / 2) in A's dtype.
        b: int32 (..., 32, registers); for `wgmma.sp` the tile in shared memory, (..., k, n) in B's dtype.
        c: int32 (..., lanes, registers).
        metadata: int32 (..., lanes); only the lanes that the selector names are read.
        selector: The sparsity selector.
        b_type: B's element type; default A's own, for a tile that of its dtype.
        accumulator: "f32", "f16" or "s32"; default the instruction's first.
        ordered: `::ordered_metadata`: positions must ascend.
        saturate: `.satfinite`, whole numbers only.

    Returns:
        D, int32 (..., lanes, registers).

    Raises:
        PackingError: Types, registers or the selector are not those of the instruction, or the metadata is undefined.
    """
    kind = _partner(row, b if row.family == "wgmma.sp" else None, b_type)
    accumulator = _accumulator(row, accumulator, saturate)
    n = b.shape[-1] if row.family == "wgmma.sp" else 8
    _require_registers(row, a, b, c, metadata, accumulator, n)
    stored = a_values(row, a) if a.dtype == torch.int32 else a
    positions = unit_positions(metadata_codes(row, metadata, selector), row.a, ordered=ordered)
    rows_of_b = _kept_columns(row, positions)
    right = kind.numbers(b_bits(row, b) if row.family == "mma.sp" else kind.raw(b))
    left = row.a.numbers(row.a.raw(stored))
    total = _product(left, right, rows_of_b) + c_values(row, c, accumulator, n).to(left.dtype)
    return c_registers(row, _rounded(total, accumulator, saturate))


def _kept_columns(row: Instruction, positions: Tensor) -> Tensor:
    """Turn positions in chunks (..., m, chunks, kept units) into dense columns of A (..., m, k / 2)."""
    unit = row.a.unit
    base = torch.arange(row.chunks, device="cpu")[:, None, None] * row.a.chunk
    return (base + positions.unsqueeze(-1) * unit + torch.arange(unit, device="cpu")).flatten(-3)


def _product(left: Tensor, right: Tensor, chosen: Tensor) -> Tensor:
    """Multiply each kept value with the row of B it chooses; what no value chooses is not looked at, be it NaN."""
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2], chosen.shape[:-2])
    left, chosen = left.expand(*batch, *left.shape[-2:]), chosen.expand(*batch, *chosen.shape[-2:])
    k, n = right.shape[-2:]
    m, kept = chosen.shape[-2:]
    flat = right.expand(*batch, k, n).reshape(-1, k, n)
    index = chosen.reshape(-1, m * kept, 1).expand(-1, -1, n)
    picked = flat.gather(1, index).view(*batch, m, kept, n)
    return (left.unsqueeze(-1) * picked).sum(-2)


def _rounded(total: Tensor, accumulator: str, saturate: bool) -> Tensor:
    if accumulator == "s32":
        limits = torch.iinfo(torch.int32)
        wrapped = ((total + 2**31) & 0xFFFFFFFF) - 2**31
        return (total.clamp(limits.min, limits.max) if saturate else wrapped).to(torch.int32)
    if accumulator == "f16":  # torch rounds float64 to float32 first, and so twice
        return torch.from_numpy(total.numpy().astype("float16"))
    return total.to(torch.float32)


def _partner(row: Instruction, tile: Tensor | None, asked: str | Element | None) -> Element:
    if asked is not None:
        kind = element(asked)
    elif tile is not None:
        kind = next((kind for kind in row.partners if kind.dtype == tile.dtype), row.a)
    else:
        kind = row.a
    if kind not in row.partners or (tile is not None and tile.dtype != kind.dtype):
        raise PackingError(
            f"{row.name} cannot read this B",
            got=kind.name if tile is None else f"{kind.name}, a tile of {tile.dtype}",
            wanted=" or ".join(f"{kind.name} ({kind.dtype})" for kind in row.partners),
        )
    return kind


def _accumulator(row: Instruction, asked: str | None, saturate: bool) -> str:
    name = asked or row.accumulators[0]
    if name not in row.accumulators or (saturate and name != "s32"):
        raise PackingError(
            f"{row.name} has no such accumulator",
            got=f"{name}{', saturating' if saturate else ''}",
            wanted=f"{' or '.join(row.accumulators)}; only s32 saturates",
        )
    return name


def _require_registers(
    row: Instruction, a: Tensor, b: Tensor, c: Tensor, metadata: Tensor, accumulator: str, n: int
) -> None:
    per_lane = row.m * n // row.lanes // (2 if accumulator == "f16" else 1)
    wanted = {
        "A": (a, (row.lanes, row.a_registers), torch.int32),
        "B": (b, (row.lanes, row.b_registers), torch.int32),
        "C": (c, (row.lanes, per_lane), torch.int32),
        "metadata": (metadata, (row.lanes,), torch.int32),
    }
    if row.family == "wgmma.sp":
        wanted["B"] = (b, (row.k, n if n in row.widths else row.widths[-1]), b.dtype)
        if a.dtype != torch.int32:
            wanted["A"] = (a, (row.m, row.k // 2), row.a.dtype)
    for name, (given, shape, dtype) in wanted.items():
        if tuple(given.shape[-len(shape) :]) != shape or given.dtype != dtype:
            raise PackingError(
                f"{row.name} does not take this {name}",
                got=f"{tuple(given.shape)} {given.dtype}",
                wanted=f"(..., {', '.join(map(str, shape))}) {dtype}",
            )
