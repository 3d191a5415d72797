"""Fragments against CuTe's layouts and against ldmatrix, and each map there and back."""

import pytest
import torch
from torch import Tensor

from tests.tensor_core.cute import layouts
from tests.tensor_core.weights import bits
from tests.turns import in_turn
from twofour.errors import PackingError
from twofour.tensor_core import ELEMENTS, INSTRUCTIONS, MMA_SP, Instruction, instruction
from twofour.tensor_core.fragments import (
    a_places,
    a_registers,
    a_values,
    b_bits,
    b_places,
    b_registers,
    c_places,
    c_registers,
    c_values,
    code_places,
    metadata_codes,
    metadata_registers,
    suppliers,
)

CUTE = layouts()
ROWS = list(INSTRUCTIONS.values())


def flat(places: tuple[Tensor, Tensor], rows: int) -> Tensor:
    """Places as CuTe numbers them: row + rows * column."""
    return places[0] + rows * places[1]


def family(row: Instruction) -> str:
    return "wgmma" if row.family == "wgmma.sp" else "mma"


# CuTe has the fragments of mma.sp on sm_120 only, and so m16n8k64 with 8 bits alone.
KNOWN = [row for row in INSTRUCTIONS.values() if f"a.{family(row)}.{row.a.bits}" in CUTE and (row.m, row.k) != (16, 32)]


@in_turn("row", KNOWN, ids=lambda row: row.name)
def test_a_is_where_cute_puts_it(row: Instruction) -> None:
    """For mma.sp CuTe's layout (of sm_120) names dense columns, two for every stored one."""
    offsets = CUTE[f"a.{family(row)}.{row.a.bits}"].offsets()
    if row.family == "mma.sp":
        offsets = offsets[:, ::2] % 16 + offsets[:, ::2] // 32 * 16
    assert torch.equal(flat(a_places(row), row.m), offsets)


@pytest.mark.parametrize("name", ["mma.sp.m16n8k64.s8", "mma.sp.m16n8k64.e4m3"])
def test_b_and_c_of_mma_are_where_cute_puts_them(name: str) -> None:
    row = instruction(name)
    columns_first = b_places(row)[1] + 8 * b_places(row)[0]  # CuTe's B is (n, k)
    assert torch.equal(columns_first, CUTE["b.mma.8"].offsets())
    assert torch.equal(flat(c_places(row), 16), CUTE["c.mma.8"].offsets())


@pytest.mark.parametrize("n", [16, 256])
def test_c_of_wgmma_is_where_cute_puts_it(n: int) -> None:
    row = instruction("wgmma.sp.m64nNk32.f16")
    assert torch.equal(flat(c_places(row, n), 64), CUTE[f"c.wgmma.{n}"].offsets())


@in_turn("row", KNOWN, ids=lambda row: row.name)
def test_metadata_is_where_cute_puts_it(row: Instruction) -> None:
    """CuTe gives every lane of four its dense elements; lanes that a selector leaves out hold copies."""
    offsets = CUTE[f"metadata.{family(row)}.{row.a.bits}"].offsets()[:, :: row.a.chunk]
    rows, chunks = code_places(row)
    for selector in range(row.selectors):
        assert torch.equal(rows + row.m * chunks * row.a.chunk, offsets[suppliers(row, selector)])


@in_turn("row", ROWS)
def test_every_map_is_one_to_one(row: Instruction) -> None:
    assert flat(a_places(row), row.m).flatten().sort().values.tolist() == list(range(row.m * row.k // 2))
    assert flat(code_places(row), row.m).flatten().sort().values.tolist() == list(range(row.m * row.chunks))
    for n in row.widths[:: len(row.widths) // 2 + 1]:
        assert flat(c_places(row, n), row.m).flatten().sort().values.tolist() == list(range(row.m * n))
    if row.family == "mma.sp":
        assert flat(b_places(row), row.k).flatten().sort().values.tolist() == list(range(row.k * 8))


@in_turn("row", ROWS)
def test_what_is_spread_comes_back(row: Instruction) -> None:
    generator = torch.Generator().manual_seed(0)
    a = bits(row.a, (3, row.m, row.k // 2), generator)
    assert torch.equal(row.a.raw(a_values(row, a_registers(row, a))), row.a.raw(a))
    codes = torch.randint(0, 16, (2, row.m, row.chunks), generator=generator).to(torch.uint8)
    for selector in range(row.selectors):
        assert torch.equal(metadata_codes(row, metadata_registers(row, codes, selector), selector), codes)
    for accumulator in row.accumulators:
        kind = {"s32": torch.int32, "f32": torch.float32, "f16": torch.float16}[accumulator]
        c = torch.randint(-99, 99, (row.m, row.widths[-1]), generator=generator).to(kind)
        assert torch.equal(c_values(row, c_registers(row, c), accumulator, row.widths[-1]), c)
    for partner in row.partners if row.family == "mma.sp" else ():
        b = bits(partner, (row.k, 8), generator)
        assert torch.equal(b_bits(row, b_registers(row, b, partner)), partner.raw(b))


def test_registers_of_a_are_what_ldmatrix_loads() -> None:
    """An 8 x 8 block of 16-bit values, row-major: lane l gets the two of row l / 4, columns 2 (l % 4)."""
    row = instruction("mma.sp.m16n8k32.bf16")
    a = torch.arange(16 * 16, dtype=torch.int16).view(16, 16)
    blocks = a.view(2, 8, 2, 8).permute(2, 0, 1, 3).reshape(4, 32, 2)  # rows first, then the right half
    loaded = blocks.to(torch.int32)[..., 0] | blocks.to(torch.int32)[..., 1] << 16
    assert torch.equal(a_registers(row, a.view(torch.bfloat16)), loaded.T)


@pytest.mark.parametrize("name", ["mma.sp.m16n8k16.f16", "mma.sp.m16n8k16.bf16"])
def test_metadata_of_m16n8k16_is_what_the_gpu_test_of_tvm_packs(name: str) -> None:
    """Apache TVM, test_tir_ptx_mma_sp.py, passes on GPUs with random masks: word g has row g, then row g + 8."""
    row = instruction(name)
    codes = torch.randint(0, 16, (16, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    words = [
        sum(int(codes[g + 8 * half, j]) << 16 * half + 4 * j for half in (0, 1) for j in range(4)) for g in range(8)
    ]
    registers = metadata_registers(row, codes, 0).view(8, 4)
    assert [int(word) & 0xFFFFFFFF for word in registers[:, 0]] == words


@in_turn("row", [row for row in ROWS if row in MMA_SP])
def test_selectors_name_lanes_of_each_four(row: Instruction) -> None:
    named = [set((suppliers(row, selector) % 4).tolist()) for selector in range(row.selectors)]
    assert named == {1: [{0}, {1}, {2}, {3}], 2: [{0, 1}, {2, 3}], 4: [{0, 1, 2, 3}]}[row.holders]
    for selector in (-1, row.selectors, 99):
        with pytest.raises(PackingError, match="no such sparsity selector"):
            suppliers(row, selector)


def test_words_hold_the_first_element_lowest() -> None:
    row = instruction("mma.sp.m16n8k128.s4")
    a = torch.zeros(16, 64, dtype=torch.int8)
    a[0, :8] = torch.tensor([1, 2, 3, 4, -1, -2, -3, -8])
    assert hex(int(a_registers(row, a)[0, 0]) & 0xFFFFFFFF) == "0x8def4321"
    assert ELEMENTS["s4"].raw(a[0, :8]).tolist() == [1, 2, 3, 4, 15, 14, 13, 8]
