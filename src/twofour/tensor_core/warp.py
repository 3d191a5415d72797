"""The order that a hand-written kernel wants: what a warp loads for a few instructions stands together.

A record holds 16 rows of A and as many K of the instruction as it has selectors, in 32-bit words:

    [step 0..selectors-1][lane 0..31][register]   the values: one 8- or 16-byte load a lane, 32 lanes side by side
    [lane 0..31]                                  the metadata: the word of each lane, for the step that names it

Records are whole multiples of 128 bytes; those of the same rows follow each other along K. A warp that walks K reads
memory once, in order, and issues `selectors` instructions a record with the metadata register it loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.tensor_core.fragments import a_registers, a_values, metadata_codes, shared_metadata
from twofour.tensor_core.instruction import Instruction, widest
from twofour.tensor_core.operand import Operand, require_operand, unit_positions

LANES = 32


@dataclass(frozen=True, eq=False)
class WarpOrder:
    """An operand as the lanes of a warp load it.

    Attributes:
        instruction: The `mma.sp` it is for; `wgmma.sp` with A in registers reads the same words, 4 row tiles together.
        words: int32 (m / 16, k / (K selectors), words of a record), contiguous.
    """

    instruction: Instruction
    words: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Dense rows and columns."""
        row = self.instruction
        return self.words.shape[0] * row.m, self.words.shape[1] * row.k * row.selectors

    @property
    def evidence(self) -> str:
        """How far the order is known: as far as the instruction's fragments."""
        return self.instruction.evidence

    @property
    def values(self) -> Tensor:
        """A's registers, a view: int32 (m / 16, records, selectors, 32, registers)."""
        row = self.instruction
        return self.words[..., :-LANES].unflatten(-1, (row.selectors, LANES, row.a_registers))

    @property
    def metadata(self) -> Tensor:
        """The metadata registers, a view: int32 (m / 16, records, 32)."""
        return self.words[..., -LANES:]

    def operand(self) -> Operand:
        """Read the operand back.

        Raises:
            PackingError: A code is undefined.
        """
        row, (m, k) = self.instruction, self.shape
        values = a_values(row, self.values).transpose(-2, -3).transpose(-3, -4).reshape(m, k // 2)
        codes = torch.stack([metadata_codes(row, self.metadata, step) for step in range(row.selectors)], -2)
        codes = codes.permute(0, 2, 1, 3, 4).reshape(m, -1)
        unit_positions(codes, row.a, ordered=True)
        return Operand(row.a, values, codes)


def record_words(row: Instruction) -> int:
    """Return the 32-bit words of a record."""
    return LANES * (row.selectors * row.a_registers + 1)


def to_warp(operand: Operand, row: Instruction | None = None) -> WarpOrder:
    """Write an operand in warp-native order.

    Args:
        operand: (m, k); m a multiple of 16, k of the instruction's K times its selectors.
        row: An `mma.sp` for the operand's type; default the widest.

    Raises:
        PackingError: The shape is no multiple of the tile, or the instruction is not for this type.
    """
    row = row or widest(operand.element)
    if row.family != "mma.sp" or row.a != operand.element:
        raise PackingError(
            f"{row.name} cannot read this operand",
            got=f"values of {operand.element.name}",
            wanted=f"{row.a.name}, and an instruction of the mma.sp family",
        )
    require_operand(operand, row.m, row.k * row.selectors, "warp-native order")
    m, k = operand.shape
    steps = (m // row.m, row.m, k // (row.k * row.selectors), row.selectors)
    values = a_registers(row, operand.values.view(*steps, row.k // 2).permute(0, 2, 3, 1, 4))
    codes = operand.codes.view(*steps, row.chunks).permute(0, 2, 3, 1, 4)
    metadata = shared_metadata(row, codes)
    return WarpOrder(row, torch.cat((values.flatten(2), metadata), -1))


def from_words(row: Instruction, words: Tensor, rows: int, columns: int) -> WarpOrder:
    """View a flat buffer of int32 words as the warp order of a (rows, columns) operand.

    Raises:
        PackingError: The buffer has another size or dtype.
    """
    shape = (rows // row.m, columns // (row.k * row.selectors), record_words(row))
    whole = rows % row.m == 0 and columns % (row.k * row.selectors) == 0
    if not whole or words.dtype != torch.int32 or words.numel() != shape[0] * shape[1] * shape[2]:
        raise PackingError(
            f"these words are no {rows} x {columns} operand of {row.name}",
            got=f"{words.numel()} of {words.dtype}",
            wanted=f"{shape[0]} x {shape[1]} records of {shape[2]} torch.int32",
        )
    return WarpOrder(row, words.reshape(shape))
