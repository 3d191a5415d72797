"""Warp-native order: what a record holds, and the way back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tensor_core.weights import FEW, NAMES, SEEDS, sparse
from tests.turns import in_turn
from twofour.errors import PackingError
from twofour.tensor_core import ELEMENTS, MMA_SP, WGMMA_SP, Instruction, Operand, instruction, to_warp
from twofour.tensor_core.fragments import a_registers, metadata_registers, suppliers
from twofour.tensor_core.warp import from_words, record_words

ROWS = {row.name: row for row in MMA_SP}


@FEW
@given(name=st.sampled_from(sorted(ROWS)), down=st.integers(1, 3), right=st.integers(1, 3), seed=SEEDS)
def test_every_instruction_comes_back(name: str, down: int, right: int, seed: int) -> None:
    row = ROWS[name]
    dense = sparse(row.a, 16 * down, row.k * row.selectors * right, seed)
    order = to_warp(Operand.from_dense(dense, row.a), row)
    assert order.shape == tuple(dense.shape)
    assert order.words.shape == (down, right, record_words(row))
    assert order.words.is_contiguous() and record_words(row) * 4 % 128 == 0
    assert torch.equal(row.a.raw(order.operand().to_dense()), row.a.raw(dense))
    again = from_words(row, order.words.flatten(), *dense.shape)
    assert torch.equal(again.operand().to_dense().to(torch.float32), dense.to(torch.float32))


def test_a_record_of_bfloat16_by_hand() -> None:
    """Lane 5 is in group 1, place 1; its first register holds row 1, stored columns 2 and 3, the second row 9."""
    dense = torch.zeros(16, 64, dtype=torch.bfloat16)
    dense[:, 0::4] = 1 + torch.arange(16 * 16).view(16, 16) / 256  # the first value of every chunk
    dense[:, 3::4] = 2
    order = to_warp(Operand.from_dense(dense, "bf16"))
    assert order.instruction.name == "mma.sp.m16n8k32.bf16" and order.words.shape == (1, 1, 32 * (2 * 4 + 1))
    bits = ELEMENTS["bf16"].raw(dense)
    first = [int(order.values[0, 0, 0, 5, register]) & 0xFFFFFFFF for register in range(4)]
    cells = (
        (1, 4),
        (9, 4),
        (1, 20),
        (9, 20),
    )  # stored column 2 is dense column 4; +8 stored columns are +16 dense ones
    assert first == [int(bits[row, column] | bits[row, column + 3] << 16) for row, column in cells]
    assert order.metadata[0, 0].tolist() == [-0x33333334] * 32  # 0xCCCCCCCC: every chunk keeps 0 and 3


def test_a_step_reads_only_the_lanes_its_selector_names() -> None:
    row = instruction("mma.sp.m16n8k16.f16")
    dense = torch.zeros(16, 64, dtype=torch.float16)
    for step, (low, high) in enumerate(((0, 1), (0, 2), (1, 3), (2, 3))):
        dense[:, step * 16 + low : step * 16 + 16 : 4] = 1
        dense[:, step * 16 + high : step * 16 + 16 : 4] = 1
    metadata = to_warp(Operand.from_dense(dense, "f16"), row).metadata.view(8, 4)
    assert [hex(int(word) & 0xFFFFFFFF) for word in metadata[0]] == [
        "0x44444444",
        "0x88888888",
        "0xdddddddd",
        "0xeeeeeeee",
    ]
    assert (metadata == metadata[0]).all()


@in_turn("row", WGMMA_SP, ids=lambda row: row.name)
def test_four_row_tiles_are_the_registers_of_a_warpgroup(row: Instruction) -> None:
    operand = Operand.from_dense(sparse(row.a, 64, row.k * row.selectors, 7), row.a)
    order = to_warp(operand)
    for step in range(row.selectors):
        half, codes = row.k // 2, row.chunks
        values = a_registers(row, row.a.from_raw(row.a.raw(operand.values)[:, step * half : (step + 1) * half]))
        assert torch.equal(order.values[:, 0, step].reshape(128, -1), values)
        metadata = metadata_registers(row, operand.codes[:, step * codes : (step + 1) * codes], step)
        named = suppliers(row, step)
        assert torch.equal(order.metadata[:, 0].flatten()[named], metadata[named])


@in_turn("name", NAMES)
def test_the_order_is_known_as_far_as_its_instruction(name: str) -> None:
    operand = Operand.from_dense(sparse(ELEMENTS[name], 16, 256, 0), name)
    assert to_warp(operand).evidence == to_warp(operand).instruction.evidence


def test_what_does_not_fit_is_refused() -> None:
    operand = Operand.from_dense(sparse(ELEMENTS["f16"], 16, 64, 0), "f16")
    with pytest.raises(PackingError, match="cannot read this operand"):
        to_warp(operand, instruction("mma.sp.m16n8k32.bf16"))
    with pytest.raises(PackingError, match="cannot read this operand"):
        to_warp(operand, instruction("wgmma.sp.m64nNk32.f16"))
    with pytest.raises(PackingError, match=r"operand.padded\(16, 64\)"):
        to_warp(Operand.from_dense(sparse(ELEMENTS["f16"], 16, 32, 0), "f16"))
    row = instruction("mma.sp.m16n8k32.f16")
    with pytest.raises(PackingError, match="these words are no 16 x 64 operand"):
        from_words(row, torch.zeros(10, dtype=torch.int32), 16, 64)
