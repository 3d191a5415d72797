"""Read off a machine, GPU or emulator, which lane's metadata register describes which chunk of A.

A is all ones. Each code of each lane's register has a number; in round r its code keeps the first half of a chunk
(0b0100) or the second (0b1110), by bit r of the number. B's column j is one in the first value of chunk j and zero
elsewhere, so D[i, j] is 1 where the code of row i, chunk j kept the first half. The rounds spell the number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from twofour.tensor_core.execute import ACCUMULATORS
from twofour.tensor_core.fragments import a_registers, b_registers, c_registers, c_values, code_places, suppliers
from twofour.tensor_core.instruction import Instruction

Machine = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A, B, C and metadata as `execute` takes them, with one leading axis, -> registers of D."""

_FIRST, _SECOND = 0x4, 0xE


def code_slots(row: Instruction, machine: Machine) -> Tensor:
    """Ask the machine which code of which lane describes each chunk.

    Returns:
        int64 (m, chunks): 8 * lane + the code's place in the lane's register, the lowest four bits first.
    """
    n = 8 if row.family == "mma.sp" else 16
    slots = torch.arange(row.lanes * 8, device="cpu")
    rounds = int(slots.max()).bit_length()
    picked = (slots >> torch.arange(rounds, device="cpu")[:, None] & 1).view(rounds, row.lanes, 8)
    codes = _FIRST + picked * (_SECOND - _FIRST)
    words = (codes << torch.arange(8, device="cpu") * 4).sum(-1)
    metadata = (words - (words >> 31 << 32)).to(torch.int32)
    ones = torch.ones(row.m, row.k // 2, dtype=torch.float32, device="cpu").to(row.a.dtype)
    a = a_registers(row, ones).expand(rounds, -1, -1)
    c = c_registers(row, torch.zeros(rounds, row.m, n, dtype=ACCUMULATORS[row.accumulators[0]], device="cpu"))
    found = torch.zeros(row.m, row.chunks, dtype=torch.int64, device="cpu")
    for start in range(0, row.chunks, n):
        hot = torch.zeros(row.k, n, dtype=torch.float32, device="cpu")
        for column, chunk in enumerate(range(start, min(start + n, row.chunks))):
            hot[chunk * row.a.chunk, column] = 1
        b = hot.to(row.a.dtype)
        b = (b_registers(row, b, row.a) if row.family == "mma.sp" else b).expand(rounds, -1, -1)
        d = c_values(row, machine(a, b, c, metadata), row.accumulators[0], n)
        bits = (d == 0).to(torch.int64) << torch.arange(rounds, device="cpu")[:, None, None]
        width = min(n, row.chunks - start)
        found[:, start : start + width] = bits.sum(0)[:, :width]
    return found


def expected_slots(row: Instruction, selector: int) -> Tensor:
    """What `code_slots` must find by the tables: int64 (m, chunks)."""
    rows, chunks = code_places(row)
    slots = torch.zeros(row.m, row.chunks, dtype=torch.int64, device="cpu")
    slots[rows, chunks] = suppliers(row, selector)[:, None] * 8 + torch.arange(8, device="cpu")
    return slots
