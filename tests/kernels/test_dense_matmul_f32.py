"""The dense float32 rows of our own against float64: cuts of tokens, inputs and outputs, epilogues, threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import each_row, threads
from tests.turns import in_turn
from twofour.errors import KernelError
from twofour.kernels.dense_matmul import Float32Matmul
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.problem import Problem
from twofour.kernels.table import rows

ROWS = [row for row in rows() if isinstance(row, Float32Matmul)]


def operands(tokens: int, out: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + out + columns)
    return tuple(torch.randn(size, generator=generator) for size in ((tokens, columns), (out, columns), (out,)))


def assert_near(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within 2 eps K^0.5 (|x||w| + |bias|) of each answer, which a sum in any order keeps for random values."""
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    assert ((y.double() - want).abs() <= 2**-23 * size * x.shape[-1] ** 0.5).all()


@each_row(ROWS, "row")
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 70), st.integers(1, 100), st.integers(1, 200), st.integers(1, 3), st.booleans())
def test_any_sizes(row: Float32Matmul, tokens: int, out: int, columns: int, team: int, biased: bool) -> None:
    x, weight, bias = operands(tokens, out, columns)
    with threads(team):
        y = row.run(x, row.prepare(weight), bias if biased else None, Problem(out))
    assert_near(y, x, weight, bias if biased else None)


@each_row(ROWS, "row")
@pytest.mark.parametrize(
    ("tokens", "out", "columns"), [(17, 40, 1025), (300, 70, 2500), (1500, 33, 96), (29, 700, 128)]
)
def test_several_passes_and_chunks(row: Float32Matmul, tokens: int, out: int, columns: int) -> None:
    x, weight, bias = operands(tokens, out, columns)
    prepared = row.prepare(weight)
    for team in (1, 2, 3):
        with threads(team):
            wide = torch.full((tokens, columns + 5), torch.nan)
            wide[:, :columns] = x
            assert_near(row.run(wide[:, :columns], prepared, bias, Problem(out)), x, weight, bias)


@each_row(ROWS, "row")
@in_turn("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@in_turn("combine", ["none", "add", "multiply"])
def test_epilogues_follow_the_whole_sum(row: Float32Matmul, activation: str, combine: str) -> None:
    for tokens, out, columns in ((5, 37, 40), (20, 64, 1500)):
        x, weight, bias = operands(tokens, out, columns)
        other = None if combine == "none" else operands(tokens, out, out)[0]
        problem = Problem(out, Epilogue(activation, combine))
        found = row.run(x, row.prepare(weight), bias, problem, other)
        want = Problem(out, Epilogue(activation, combine)).finish(
            torch.nn.functional.linear(x.double(), weight.double(), bias.double()),
            None if other is None else other.double(),
        )
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=2e-4)


@each_row(ROWS, "row")
def test_values_that_are_no_numbers_stay_in_their_row(row: Float32Matmul) -> None:
    x, weight, bias = operands(16, 33, 70)
    x[3, 5], x[9, 0] = torch.nan, torch.inf
    y = row.run(x, row.prepare(weight), bias, Problem(33))
    assert y[3].isnan().all() and y[9].isinf().all()
    others = [index for index in range(16) if index not in (3, 9)]
    assert_near(y[others], x[others], weight, bias)


@each_row(ROWS, "row")
def test_a_weight_comes_back_as_it_was(row: Float32Matmul) -> None:
    for out, columns in ((1, 1), (32, 8), (33, 70)):
        weight = torch.randn(out, columns)
        prepared = row.prepare(weight)
        assert torch.equal(prepared.restore(), weight) and torch.equal(prepared.copy().restore(), weight)
        assert prepared.nbytes == row.least_bytes(out, columns)


def test_bytes_of_another_weight_are_refused() -> None:
    row = ROWS[0]
    with pytest.raises(KernelError, match=r"bytes made for another kernel(.|\n)*dense_panels"):
        row.run(torch.randn(3, 8), row.prepare(torch.randn(4, 9)), None, Problem(4))
    with pytest.raises(KernelError, match=r"input(.|\n)*float32"):
        row.run(torch.randn(3, 8).bfloat16(), row.prepare(torch.randn(4, 8)), None, Problem(4))
