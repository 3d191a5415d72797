"""Dense int4 weights in groups: every row against the product with the dequantised weight in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import each_row
from tests.kernels.bounds import int4_bound
from tests.turns import in_turn
from twofour.errors import KernelError
from twofour.kernels import rows
from twofour.kernels.dense_matmul import Int4Matmul
from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue
from twofour.kernels.problem import Problem
from twofour.packing import Packed, pack
from twofour.packing.encodings import INT4, dequantize
from twofour.patterns import parse

ROWS = [row for row in rows() if isinstance(row, Int4Matmul)]


def assert_close(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Every dense row reads activations in fixed point; y is rounded once more."""
    want = x.double() @ weight.double().T
    want = want if bias is None else want + bias.double()
    bound = int4_bound(x, weight, fixed=True)
    bound = bound + want.abs() / (256 if y.dtype == torch.bfloat16 else 1e6) + 1e-7
    assert ((y.double() - want).abs() <= bound).all()


def rounded(weight: torch.Tensor) -> torch.Tensor:
    group = 64 if weight.shape[1] % 64 == 0 else 32
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group))
    return dequantize(*INT4.quantize(padded, group))[:, : weight.shape[1]]


@each_row(ROWS)
@given(tokens=st.integers(0, 20), out=st.integers(1, 100), columns=st.integers(1, 300), bias=st.booleans(),
       dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 2**31))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_float_weight(row: Int4Matmul, tokens: int, out: int, columns: int, bias: bool, dtype: torch.dtype,
                          seed: int) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, columns, generator=generator)
    x = torch.randn(tokens, columns, generator=generator).to(dtype)
    b = torch.randn(out, generator=generator) if bias else None
    y = row.run(x, row.prepare(weight), b, Problem(out))
    assert y.shape == (tokens, out) and y.dtype == dtype
    if tokens:
        assert_close(y, x, rounded(weight), b)


@each_row(ROWS)
@in_turn("group", [32, 64, 128])
@in_turn("symmetric", [True, False])
def test_a_packed_weight_keeps_its_numbers(row: Int4Matmul, group: int, symmetric: bool) -> None:
    weight = torch.randn(70, 1024)
    weight *= parse("2:4").project(weight, absolute=True)
    packed = pack(weight, "2:4", "int4", group=group, symmetric=symmetric)
    prepared = row.prepare(packed)
    for tokens in (1, 4, 9):
        x = torch.randn(tokens, 1024)
        assert_close(row.run(x, prepared, None, Problem(70)), x, packed.unpack(), None)


@in_turn("columns", [37, 96, 256])
@in_turn("group", [32, 64, 128])
@in_turn("symmetric", [True, False])
def test_a_file_holds_the_numbers_that_run(columns: int, group: int, symmetric: bool) -> None:
    row = next(row for row in ROWS if row.unavailable() is None)
    weight = torch.randn(70, columns) + 0.3
    packed = pack(weight, "dense", "int4", group=group, symmetric=symmetric) if columns % group == 0 else weight
    prepared = row.prepare(packed)
    stored = row.stored(prepared)
    if columns % 32:
        assert isinstance(stored, torch.Tensor) and torch.equal(stored, rounded(weight))
        return
    assert isinstance(stored, Packed)
    stored.validate()
    assert torch.equal(row.restore(prepared), stored.unpack()) and torch.equal(
        row.prepare(stored).tensor, prepared.tensor
    )
    if isinstance(packed, Packed):
        assert stored.header == packed.header and torch.equal(stored.values, packed.values)
        assert torch.equal(stored.unpack(), packed.unpack())


@each_row(ROWS)
def test_epilogues(row: Int4Matmul) -> None:
    weight, x, other, bias = torch.randn(40, 64), torch.randn(3, 64), torch.randn(3, 40), torch.randn(40)
    plain = x @ rounded(weight).T + bias
    for epilogue in (PLAIN_EPILOGUE, Epilogue("silu", "multiply"), Epilogue("gelu", "add"), Epilogue("relu")):
        second = None if epilogue.combine == "none" else other
        y = row.run(x, row.prepare(weight), bias, Problem(40, epilogue), second)
        torch.testing.assert_close(y, epilogue.apply(plain, second), rtol=2e-3, atol=2e-3)


def test_foreign_bytes_and_inputs_are_refused() -> None:
    row = next(row for row in ROWS if row.unavailable() is None)
    prepared = row.prepare(torch.randn(8, 64))
    with pytest.raises(KernelError, match="made for another kernel"):
        row.run(torch.randn(2, 64), prepared, None, Problem(9))
    with pytest.raises(KernelError, match="cannot read its input"):
        row.run(torch.randn(2, 64).double(), prepared, None, Problem(8))
    assert prepared.nbytes >= row.least_bytes(8, 64)
