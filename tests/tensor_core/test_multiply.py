"""Whole products through the instructions, against float64 and against torch's integer product."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tensor_core.weights import FEW, SEEDS, numbers, sparse
from twofour.errors import PackingError
from twofour.tensor_core import ELEMENTS, INSTRUCTIONS, Operand, instruction, multiply


@FEW
@given(
    name=st.sampled_from(sorted(INSTRUCTIONS)), m=st.integers(1, 40), n=st.integers(1, 20), data=st.data(), seed=SEEDS
)
def test_every_instruction_makes_the_same_product(name: str, m: int, n: int, data: st.DataObject, seed: int) -> None:
    """Padding, selectors and steps: whole numbers make every order of summing exact."""
    row = INSTRUCTIONS[name]
    k = row.a.chunk * data.draw(st.integers(1, 3 * row.k // row.a.chunk))
    dense = sparse(row.a, m, k, seed)
    b = numbers(data.draw(st.sampled_from(row.partners)), (k, n), torch.Generator().manual_seed(seed))
    exact = dense.to(torch.float64) @ b.to(torch.float64)
    for accumulator in row.accumulators:
        d = multiply(Operand.from_dense(dense, row.a), b, row, accumulator=accumulator)
        assert torch.equal(d.to(torch.float64), exact)


@pytest.mark.parametrize("name", ["mma.sp.m16n8k32.bf16", "wgmma.sp.m64nNk32.bf16", "mma.sp.m16n8k16.tf32"])
def test_real_numbers_are_as_close_as_float32_sums_can_be(name: str) -> None:
    row, generator = instruction(name), torch.Generator().manual_seed(1)
    dense = sparse(row.a, 48, 256, 1, full=True) * torch.randn(48, 256, generator=generator).to(row.a.dtype)
    b = torch.randn(256, 24, generator=generator).to(row.a.dtype)
    if name.endswith("tf32"):
        dense, b = ((value.view(torch.int32) & ~0x1FFF).view(torch.float32) for value in (dense, b))
    exact = dense.to(torch.float64) @ b.to(torch.float64)
    error = (multiply(Operand.from_dense(dense, row.a), b, row) - exact).norm() / exact.norm()
    assert error < 2**-23 * 256**0.5


def test_what_does_not_fit_is_refused() -> None:
    operand = Operand.from_dense(sparse(ELEMENTS["s8"], 16, 64, 0), "s8")
    with pytest.raises(PackingError, match="cannot multiply these"):
        multiply(operand, torch.zeros(32, 8, dtype=torch.int8))
    with pytest.raises(PackingError, match="cannot multiply these"):
        multiply(operand, torch.zeros(64, 8))
    with pytest.raises(PackingError, match="cannot multiply these"):
        multiply(operand, torch.zeros(64, 8, dtype=torch.int8), instruction("mma.sp.m16n8k64.u8"))
    with pytest.raises(PackingError, match="no such accumulator"):
        multiply(operand, torch.zeros(64, 8, dtype=torch.int8), accumulator="f32")
