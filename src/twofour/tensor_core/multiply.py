"""A whole sparse product through the instructions, register by register: slow, and what a kernel must reproduce."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from twofour.errors import PackingError
from twofour.tensor_core.execute import ACCUMULATORS, execute
from twofour.tensor_core.fragments import b_registers, c_registers, c_values, metadata_registers
from twofour.tensor_core.instruction import Instruction, instruction, widest
from twofour.tensor_core.operand import Operand
from twofour.tensor_core.warp import to_warp


def multiply(
    operand: Operand,
    b: Tensor,
    row: Instruction | None = None,
    *,
    accumulator: str | None = None,
    ordered: bool = True,
    saturate: bool = False,
) -> Tensor:
    """Multiply a sparse A (m, k) with a dense B as a kernel would: padded tiles, K in steps, each one instruction.

    Sums run through the accumulator once per instruction, in ascending K, and are rounded there each time.

    Args:
        operand: A.
        b: (k, n) in the dtype of a partner of A's type.
        row: The instruction or its name; default the widest `mma.sp`.
        accumulator: "f32", "f16" or "s32"; default the instruction's first.
        ordered: As `mma.sp::ordered_metadata`.
        saturate: `.satfinite`, once per instruction.

    Returns:
        (m, n) in the accumulator's dtype.

    Raises:
        PackingError: Shapes or types do not fit.
    """
    row = instruction(row) if isinstance(row, str) else row or widest(operand.element)
    partner = next((kind for kind in row.partners if kind.dtype == b.dtype), None)
    if partner is None or row.a != operand.element or b.ndim != 2 or len(b) != operand.shape[1]:
        raise PackingError(
            f"{row.name} cannot multiply these",
            got=f"A {operand.shape} of {operand.element.name}, B {tuple(b.shape)} {b.dtype}",
            wanted=f"A (m, k) of {row.a.name}, B (k, n) in "
            f"{' or '.join(sorted({str(kind.dtype) for kind in row.partners}))}",
        )
    name = accumulator or row.accumulators[0]
    (m, _), n = operand.shape, b.shape[1]
    width = 8 if row.family == "mma.sp" else next((w for w in row.widths if w >= n), row.widths[-1])
    padded = operand.padded(row.m, row.k * row.selectors)
    raw = pad(partner.raw(b), (0, -n % width, 0, padded.shape[1] - len(b)))
    tiles = partner.from_raw(raw).view(-1, row.k, raw.shape[1] // width, width).transpose(1, 2)
    options = {"b_type": partner, "accumulator": name, "ordered": ordered, "saturate": saturate}
    start = torch.zeros(
        padded.shape[0] // row.m, tiles.shape[1], row.m, width, dtype=ACCUMULATORS.get(name), device="cpu"
    )
    c = c_registers(row, start)
    right = b_registers(row, tiles, partner) if row.family == "mma.sp" else tiles
    for step, (a, metadata) in enumerate(_steps(padded, row)):
        c = execute(row, a[:, None], right[step], c, metadata[:, None], selector=step % row.selectors, **options)
    d = c_values(row, c, name, width)
    return d.transpose(1, 2).reshape(padded.shape[0], -1)[:m, :n].contiguous()


def _steps(operand: Operand, row: Instruction) -> list[tuple[Tensor, Tensor]]:
    """A's registers (a tile for wgmma) and metadata (m tiles, lanes) of each instruction along K."""
    if row.family == "mma.sp":
        order = to_warp(operand, row)
        records = range(order.words.shape[1])
        return [(order.values[:, r, s], order.metadata[:, r]) for r in records for s in range(row.selectors)]
    m, k = operand.shape
    values = operand.element.raw(operand.values).view(m // row.m, row.m, k // row.k, row.k // 2)
    codes = operand.codes.view(m // row.m, row.m, k // row.k, row.chunks)
    return [
        (operand.element.from_raw(values[:, :, step]), metadata_registers(row, codes[:, :, step], step % row.selectors))
        for step in range(k // row.k)
    ]
