"""Which lane and register holds which element of A, B, C, D and of the metadata, for every instruction.

With g = lane / 4 % 8 (the group), q = lane % 4 (the place in it), w = lane / 32 (the warp of a warpgroup) and
e elements of A's type in a register (PTX ISA 9.0, 9.7.14.6.2 and 9.7.15.6.2; B, C, D as in 9.7.14.5):

    A, register r, element i:  row 16 w + g + 8 (r % 2),  stored column 4 e (r / 2) + e q + i
    B, register r, element i:  row (of K) 4 e r + e q + i,  column g
    C, D, register r:          row 16 w + g + 8 (r / 2 % 2),  column 8 (r / 4) + 2 q + r % 2
    metadata, code i of 8:     two rows a word: row 16 w + g + 8 (i / 4),  chunk 4 q' + i % 4
                               one row a word:  row 16 w + g + 8 (q' % 2), chunk 8 (q' / 2) + i

where q' counts the lanes of a group that supply metadata: those the selector names.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from twofour.errors import PackingError
from twofour.tensor_core.element import ELEMENTS, WORD, Element, from_words, to_words
from twofour.tensor_core.instruction import Instruction

Places = tuple[Tensor, Tensor]
"""Row and column of every element, two int64 tensors (lanes, elements of a lane)."""


@cache
def a_places(row: Instruction) -> Places:
    """Place in the stored A (m, k / 2) of each lane's elements, registers in their order, low elements first."""
    group, quad, warp = _lanes(row)
    e = row.a.per_word
    r, i = _registers(row.a_registers, e)
    return 16 * warp + group + 8 * (r % 2), 4 * e * (r // 2) + e * quad + i


@cache
def b_places(row: Instruction) -> Places:
    """Place in the dense B (k, 8) of each lane's elements; `mma.sp` only."""
    group, quad, _ = _lanes(row)
    e = row.a.per_word
    r, i = _registers(row.b_registers, e)
    k = 4 * e * r + e * quad + i
    return k, group.expand_as(k)


@cache
def c_places(row: Instruction, n: int = 8) -> Places:
    """Place in C and D (m, n) of each lane's elements, one a register for f32 and s32, two for f16."""
    group, quad, warp = _lanes(row)
    r = torch.arange(n // 2, device="cpu")
    return 16 * warp + group + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * quad + r % 2


@cache
def code_places(row: Instruction) -> Places:
    """Place in the codes of A (m, chunks) of the eight codes in the word of each lane that supplies metadata.

    The lanes are `suppliers(row, selector)`; the places do not depend on the selector.
    """
    lanes = suppliers(row, 0)
    group, warp, member = lanes // 4 % 8, lanes // WORD, lanes % 4
    i = torch.arange(8, device="cpu")
    group, warp, member = group[:, None], warp[:, None], member[:, None]
    if row.rows_per_word == 2:
        return 16 * warp + group + 8 * (i // 4), 4 * member + i % 4
    return 16 * warp + group + 8 * (member % 2) + 0 * i, 8 * (member // 2) + i


def suppliers(row: Instruction, selector: int) -> Tensor:
    """Return the lanes whose metadata register counts: int64, `row.holders` of each four.

    Raises:
        PackingError: The selector is not legal for the instruction (9.7.14.6.1).
    """
    if not 0 <= selector < row.selectors:
        raise PackingError(
            f"{row.name} has no such sparsity selector",
            got=repr(selector),
            wanted="0" if row.selectors == 1 else f"0 to {row.selectors - 1}",
        )
    lanes = torch.arange(row.lanes, device="cpu")
    return lanes[lanes % 4 // row.holders == selector]


def a_registers(row: Instruction, values: Tensor) -> Tensor:
    """Spread stored values of A, (..., m, k / 2) in its dtype, over the lanes: int32 (..., lanes, registers)."""
    rows, columns = a_places(row)
    return to_words(row.a.raw(values)[..., rows, columns], row.a.bits)


def a_values(row: Instruction, registers: Tensor) -> Tensor:
    """Undo `a_registers`."""
    bits = _gathered(from_words(registers, row.a.bits), a_places(row), (row.m, row.k // 2))
    return row.a.from_raw(bits)


def b_registers(row: Instruction, b: Tensor, kind: Element) -> Tensor:
    """Spread B, (..., k, 8) in the dtype of `kind`, over the lanes: int32 (..., 32, registers)."""
    rows, columns = b_places(row)
    return to_words(kind.raw(b)[..., rows, columns], kind.bits)


def b_bits(row: Instruction, registers: Tensor) -> Tensor:
    """Return the raw bits of B (..., k, 8) that the lanes hold, int64."""
    return _gathered(from_words(registers, row.a.bits), b_places(row), (row.k, 8))


def c_registers(row: Instruction, c: Tensor) -> Tensor:
    """Spread C, (..., m, n) in int32, float32 or float16, over the lanes: int32 (..., lanes, registers)."""
    rows, columns = c_places(row, c.shape[-1])
    spread = c[..., rows, columns].contiguous()
    return to_words(ELEMENTS["f16"].raw(spread), 16) if c.dtype == torch.float16 else spread.view(torch.int32)


def c_values(row: Instruction, registers: Tensor, accumulator: str, n: int = 8) -> Tensor:
    """Undo `c_registers`: (..., m, n) in the accumulator's dtype ("f32", "f16" or "s32")."""
    if accumulator == "f16":
        return ELEMENTS["f16"].from_raw(_gathered(from_words(registers, 16), c_places(row, n), (row.m, n)))
    values = registers if accumulator == "s32" else registers.contiguous().view(torch.float32)
    return _gathered(values, c_places(row, n), (row.m, n))


def metadata_registers(row: Instruction, codes: Tensor, selector: int = 0) -> Tensor:
    """Spread codes (..., m, chunks) over the lanes that supply them: int32 (..., lanes); other lanes get 0."""
    rows, chunks = code_places(row)
    words = to_words(codes.to(torch.int64)[..., rows, chunks], 4).squeeze(-1)
    registers = torch.zeros(*words.shape[:-1], row.lanes, dtype=torch.int32, device="cpu")
    registers[..., suppliers(row, selector)] = words
    return registers


def shared_metadata(row: Instruction, codes: Tensor) -> Tensor:
    """Fill every lane's register from codes (..., selectors, m, chunks), one instruction each: int32 (..., lanes)."""
    words = [metadata_registers(row, codes[..., selector, :, :], selector) for selector in range(row.selectors)]
    return torch.stack(words).sum(0, dtype=torch.int32)


def metadata_codes(row: Instruction, registers: Tensor, selector: int = 0) -> Tensor:
    """Read the codes (..., m, chunks), uint8, from the lanes that the selector names; the others do not matter."""
    words = registers[..., suppliers(row, selector)].unsqueeze(-1)
    return _gathered(from_words(words, 4), code_places(row), (row.m, row.chunks)).to(torch.uint8)


def _lanes(row: Instruction) -> tuple[Tensor, Tensor, Tensor]:
    lanes = torch.arange(row.lanes, device="cpu")[:, None]
    return lanes // 4 % 8, lanes % 4, lanes // WORD


def _registers(count: int, per_word: int) -> tuple[Tensor, Tensor]:
    flat = torch.arange(count * per_word, device="cpu")
    return flat // per_word, flat % per_word


def _gathered(spread: Tensor, places: Places, shape: tuple[int, int]) -> Tensor:
    """Collect what the lanes hold, (..., lanes, elements), into a matrix (..., *shape)."""
    matrix = torch.empty(*spread.shape[:-2], *shape, dtype=spread.dtype, device="cpu")
    matrix[..., places[0], places[1]] = spread
    return matrix
