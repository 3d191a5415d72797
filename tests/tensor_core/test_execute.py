"""One instruction at a time against products in float64 and whole numbers."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tensor_core.weights import FEW, SEEDS, numbers, sparse
from tests.turns import in_turn
from twofour.errors import PackingError
from twofour.tensor_core import INSTRUCTIONS, MMA_SP, Instruction, Operand, execute, instruction
from twofour.tensor_core.execute import ACCUMULATORS
from twofour.tensor_core.fragments import a_registers, b_registers, c_registers, c_values, metadata_registers, suppliers

NAMES = sorted(INSTRUCTIONS)


def wide(values: Tensor) -> Tensor:
    return values.to(torch.float64)


def run(row: Instruction, dense: Tensor, b: Tensor, c: Tensor, **options) -> Tensor:
    """Spread the matrices over registers, execute, and collect D."""
    operand, selector = Operand.from_dense(dense, row.a), options.get("selector", 0)
    metadata = metadata_registers(row, operand.codes, selector)
    partner = next(kind for kind in row.partners if kind.dtype == b.dtype)
    right = b_registers(row, b, partner) if row.family == "mma.sp" else b
    name = next(name for name, dtype in ACCUMULATORS.items() if dtype == c.dtype)
    spread = c_registers(row, c)
    d = execute(
        row, a_registers(row, operand.values), right, spread, metadata, b_type=partner, accumulator=name, **options
    )
    return c_values(row, d, name, c.shape[-1])


@FEW
@given(name=st.sampled_from(NAMES), data=st.data(), seed=SEEDS)
def test_every_instruction_multiplies(name: str, data: st.DataObject, seed: int) -> None:
    """Small whole numbers: exact in every type, whatever the order of summing."""
    row = INSTRUCTIONS[name]
    partner = data.draw(st.sampled_from(row.partners))
    accumulator = ACCUMULATORS[data.draw(st.sampled_from(row.accumulators))]
    n = data.draw(st.sampled_from(row.widths[:4]))
    generator = torch.Generator().manual_seed(seed)
    dense = sparse(row.a, row.m, row.k, seed)
    b, c = (
        numbers(partner, (row.k, n), generator),
        torch.randint(-9, 9, (row.m, n), generator=generator).to(accumulator),
    )
    selector = data.draw(st.integers(0, row.selectors - 1))
    d = run(row, dense, b, c, selector=selector, ordered=data.draw(st.booleans()))
    assert d.dtype == accumulator
    assert torch.equal(wide(d), wide(dense) @ wide(b) + wide(c))


@pytest.mark.parametrize("name", ["f16", "bf16", "tf32", "e4m3", "e5m2"])
def test_floats_are_summed_exactly_and_rounded_once(name: str) -> None:
    row = next(row for row in MMA_SP if row.a.name == name)
    generator = torch.Generator().manual_seed(3)
    dense = sparse(row.a, 16, row.k, 3, full=True)
    dense = (dense.to(torch.float32) * torch.randn(16, row.k, generator=generator)).to(row.a.dtype)
    b = torch.randn(row.k, 8, generator=generator).to(row.a.dtype)
    c = torch.randn(16, 8, generator=generator)
    cut = (lambda values: (values.view(torch.int32) & ~0x1FFF).view(torch.float32)) if name == "tf32" else wide
    exact = wide(cut(dense)) @ wide(cut(b)) + wide(c)
    assert (run(row, dense, b, c) - exact.to(torch.float32)).abs().max() <= 2e-7 * exact.abs().max()


def test_tf32_drops_the_thirteen_lowest_bits() -> None:
    row = instruction("mma.sp.m16n8k8.tf32")
    dense, b = torch.zeros(16, 8), torch.zeros(8, 8)
    dense[0, 0], b[0, 0] = 1 + 2**-11 + 2**-23, 1.0
    assert run(row, dense, b, torch.zeros(16, 8))[0, 0] == 1.0
    dense[0, 0] = 1 + 2**-10
    assert run(row, dense, b, torch.zeros(16, 8))[0, 0] == 1 + 2**-10


def test_half_accumulators_round_once_from_the_exact_sum() -> None:
    """1 + 2^-11 + 2^-40 rounds up to 1 + 2^-10; by way of float32 it would be a tie and round to 1."""
    row = instruction("mma.sp.m16n8k16.f16")
    dense, b = torch.zeros(16, 16, dtype=torch.float16), torch.zeros(16, 8, dtype=torch.float16)
    dense[0, 0], b[0, 0] = 1, 1
    dense[0, 4], b[4, 0] = 2**-11, 1
    dense[0, 8], b[8, 0] = 2**-20, 2**-20
    assert run(row, dense, b, torch.zeros(16, 8, dtype=torch.float16))[0, 0] == 1 + 2**-10


@pytest.mark.parametrize("name", ["mma.sp.m16n8k128.s4", "mma.sp.m16n8k64.s8", "wgmma.sp.m64nNk64.u8"])
def test_whole_numbers_wrap_or_saturate(name: str) -> None:
    row = instruction(name)
    dense = sparse(row.a, row.m, row.k, 0, full=True)
    b = torch.full((row.k, 8), 3, dtype=row.partners[0].dtype)
    c = torch.full((row.m, 8), 2**31 - 1, dtype=torch.int32)
    exact = dense.to(torch.int64) @ b.to(torch.int64) + c.to(torch.int64)
    assert (exact > 2**31 - 1).any()
    assert torch.equal(run(row, dense, b, c), exact.to(torch.int32))
    assert torch.equal(run(row, dense, b, c, saturate=True), exact.clamp(-(2**31), 2**31 - 1).to(torch.int32))


def test_what_is_not_chosen_does_not_matter() -> None:
    """NaN in rows of B that no kept value chooses; rubbish in registers of lanes that the selector leaves out."""
    row = instruction("mma.sp.m16n8k32.f16")
    dense = torch.zeros(16, 32, dtype=torch.float16)
    dense[:, 1::4], dense[:, 3::4] = 1, 2
    b = torch.ones(32, 8, dtype=torch.float16)
    b[0::4], b[2::4] = float("nan"), float("inf")
    operand = Operand.from_dense(dense, "f16")
    metadata = metadata_registers(row, operand.codes, 1)
    others = torch.ones(32, dtype=torch.bool)
    others[suppliers(row, 1)] = False
    metadata[others] = -1
    spread = a_registers(row, operand.values), b_registers(row, b, row.a), torch.zeros(32, 4, dtype=torch.int32)
    d = c_values(row, execute(row, *spread, metadata, selector=1), "f32")
    assert (d == 24).all()
    with pytest.raises(PackingError, match="behaviour is undefined"):
        execute(row, *spread, metadata, selector=0)


def test_only_ordered_metadata_minds_the_order() -> None:
    """0b0001 names position 1 first: the first stored value multiplies row 1 of B, the second row 0."""
    row = instruction("mma.sp.m16n8k16.bf16")
    a = torch.tensor([[5.0, 7.0] * 4] * 16).to(torch.bfloat16)
    b = torch.zeros(16, 8, dtype=torch.bfloat16)
    b[0], b[1] = 1, 10
    metadata = metadata_registers(row, torch.full((16, 4), 0b0001, dtype=torch.uint8))
    spread = a_registers(row, a), b_registers(row, b, row.a), torch.zeros(32, 4, dtype=torch.int32), metadata
    assert (c_values(row, execute(row, *spread), "f32") == 57).all()
    with pytest.raises(PackingError, match="behaviour is undefined"):
        execute(row, *spread, ordered=True)


@in_turn("name", [name for name in NAMES if name.startswith("wgmma")])
def test_wgmma_takes_a_from_registers_or_from_its_tile(name: str) -> None:
    row = instruction(name)
    operand = Operand.from_dense(sparse(row.a, row.m, row.k, 5), row.a)
    b = numbers(row.a, (row.k, 16), torch.Generator().manual_seed(5))
    c = torch.zeros(128, 8, dtype=torch.int32)
    metadata = metadata_registers(row, operand.codes)
    from_registers = execute(row, a_registers(row, operand.values), b, c, metadata)
    assert torch.equal(from_registers, execute(row, operand.values, b, c, metadata))


def test_instructions_run_side_by_side() -> None:
    row = instruction("mma.sp.m16n8k64.e4m3")
    operand = Operand.from_dense(sparse(row.a, 16, 64, 0), row.a)
    a, metadata = a_registers(row, operand.values), metadata_registers(row, operand.codes)
    b = b_registers(row, numbers(row.a, (3, 64, 8), torch.Generator().manual_seed(0)), row.a)
    c = torch.zeros(3, 32, 4, dtype=torch.int32)
    together = execute(row, a, b, c, metadata)
    assert torch.equal(together, torch.stack([execute(row, a, b[i], c[i], metadata) for i in range(3)]))


@FEW
@given(name=st.sampled_from(sorted(row.name for row in MMA_SP)), seed=SEEDS)
def test_any_bits_in_registers_give_an_answer_or_a_refusal(name: str, seed: int) -> None:
    row, generator = instruction(name), torch.Generator().manual_seed(seed)
    words = lambda *shape: torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)  # noqa: E731
    a, b, c, metadata = words(32, row.a_registers), words(32, row.b_registers), words(32, 4), words(32)
    try:
        assert execute(row, a, b, c, metadata).shape == (32, 4)
    except PackingError as error:
        assert "undefined" in str(error)
    legal = torch.full((32,), 0x44444444, dtype=torch.int32)
    assert execute(row, a, b, c, legal).shape == (32, 4)


def test_what_does_not_fit_is_refused() -> None:
    row = instruction("mma.sp.m16n8k32.f16")
    a, c = torch.zeros(32, 4, dtype=torch.int32), torch.zeros(32, 4, dtype=torch.int32)
    metadata = torch.full((32,), 0x44444444, dtype=torch.int32)
    cases: tuple[tuple[tuple[Tensor, ...], dict[str, Any], str], ...] = (
        ((a[:, :2], a, c, metadata), {}, "does not take this A"),
        ((a, a[:, :2], c, metadata), {}, "does not take this B"),
        ((a, a, c, metadata), {"accumulator": "f16"}, "does not take this C"),
        ((a, a, c, metadata[:16]), {}, "does not take this metadata"),
        ((a, a, c, metadata), {"accumulator": "s32"}, "no such accumulator"),
        ((a, a, c, metadata), {"saturate": True}, "no such accumulator"),
        ((a, a, c, metadata), {"b_type": "bf16"}, "cannot read this B"),
        ((a, a, c, metadata), {"selector": 2}, "no such sparsity selector"),
    )
    for tensors, options, message in cases:
        with pytest.raises(PackingError, match=message):
            execute(row, *tensors, **options)
    wgmma = instruction("wgmma.sp.m64nNk64.s8")
    tile = torch.zeros(64, 40, dtype=torch.int8)  # whole numbers have no N of 40
    registers = torch.zeros(128, 4, dtype=torch.int32), tile, torch.zeros(128, 20, dtype=torch.int32)
    with pytest.raises(PackingError, match="does not take this B"):
        execute(wgmma, *registers, torch.full((128,), 0x44444444, dtype=torch.int32))
