"""MKL's product on a weight packed for one token count: its values there and at every other count."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twofour.compiler.layer import PreparedWeights
from twofour.kernels.dense_matmul import MKL, MklMatmul
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.problem import Problem
from twofour.packing import pack
from twofour.patterns import parse

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this build of torch has no MKL")


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def close(y: torch.Tensor, want: torch.Tensor) -> None:
    assert y.dtype is torch.float32
    torch.testing.assert_close(y.double(), want, atol=1e-5 * float(want.abs().max()), rtol=0)


@settings(deadline=None, max_examples=25)
@given(
    kernel=st.sampled_from(MKL),
    other=st.integers(1, 40),
    rows=st.integers(1, 70),
    columns=st.integers(1, 90),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_at_its_token_count_and_at_others(
    kernel: MklMatmul, other: int, rows: int, columns: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, b = torch.randn(rows, columns), torch.randn(rows) if bias else None
    prepared = kernel.prepare(weight)
    assert torch.equal(kernel.restore(prepared), weight)
    for tokens in (kernel.tokens, other):
        x = torch.randn(tokens, columns)
        close(kernel.run(x, prepared, b, Problem(rows)), reference(x, weight, b))
        strided = torch.randn(tokens, 2 * columns)[:, ::2]
        close(kernel.run(strided, prepared, b, Problem(rows)), reference(strided, weight, b))


@pytest.mark.parametrize("kernel", MKL, ids=lambda kernel: kernel.name)
def test_epilogues_packed_weights_and_pickles(kernel: MklMatmul) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 32)
    weight *= parse("2:4").project(weight, absolute=True)
    prepared = kernel.prepare(pack(weight, "2:4"))
    x, bias, other = torch.randn(kernel.tokens, 32), torch.randn(24), torch.randn(kernel.tokens, 24)
    want = torch.relu(reference(x, weight, bias)) + other.double()
    close(kernel.run(x, prepared, bias, Problem(24, Epilogue("relu", "add")), other), want)
    held = PreparedWeights([prepared])
    assert held.nbytes > 2 * weight.nbytes, "the plain weight is kept beside it"
    again = pickle.loads(pickle.dumps(held))
    close(kernel.run(x, again.weights[0], bias, Problem(24)), reference(x, weight, bias))
