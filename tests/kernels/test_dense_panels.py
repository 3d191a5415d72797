"""The dense bfloat16 and int8 rows of our own: cuts of tokens, outputs and inputs, ranges, epilogues."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import each_row, threads
from tests.turns import in_turn
from twofour.compiler.choose import candidates
from twofour.errors import KernelError
from twofour.kernels.base import Kernel
from twofour.kernels.dense_matmul import Int8Panels, RealPanels
from twofour.kernels.dense_matmul.native_dense import PanelMatmul
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.nm_matmul import nm_matmul_int8_reference
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import DYNAMIC, LARGEST_REDUCTION, Quantization
from twofour.kernels.table import rows
from twofour.packing import Packed, pack

INT8 = [row for row in rows() if isinstance(row, Int8Panels)]
LOOKED_UP = [row for row in rows() if isinstance(row, PanelMatmul)]
BF16 = [row for row in rows() if isinstance(row, RealPanels) and row.dtype == "bfloat16"]


def operands(tokens: int, out: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs between numbers that are none, a weight and a bias."""
    generator = torch.Generator().manual_seed(tokens + out + columns)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((tokens, columns), (out, columns), (out,)))
    around = torch.full((tokens, columns + 3), torch.nan)
    around[:, :columns] = x
    return around[:, :columns], weight, bias


def whole(weight: Tensor) -> Packed:
    """Return the same int8 weight in a form that the reference unpacks: blocks, all of them kept."""
    return pack(weight, "block:1x4@0", "int8")


SIZES = st.integers(0, 60), st.integers(1, 100), st.integers(1, 200), st.integers(1, 3)


@each_row(INT8, "row")
@settings(max_examples=15, deadline=None)
@given(*SIZES, st.sampled_from([DYNAMIC, Quantization(0.03, 100)]), st.booleans())
def test_whole_numbers_of_any_sizes(
    row: Kernel, tokens: int, out: int, columns: int, team: int, quantization: Quantization, low: bool
) -> None:
    x, weight, bias = operands(tokens, out, columns)
    x, packed = x.bfloat16() if low else x, whole(weight)
    with threads(team):
        y = row.run(x, row.prepare(weight), bias, Problem(out, quantization=quantization))
    assert torch.equal(y, nm_matmul_int8_reference(x, packed, bias, quantization))
    assert torch.equal(row.run(x, row.prepare(packed), bias, Problem(out, quantization=quantization)), y)


@each_row(LOOKED_UP, "row")
@settings(max_examples=10, deadline=None)
@given(st.integers(1, 100), st.integers(1, 70), st.lists(st.integers(0, 99), max_size=40))
def test_rows_are_those_of_the_weight(row: PanelMatmul, out: int, columns: int, places: list[int]) -> None:
    _, weight, _ = operands(1, out, columns)
    prepared, found = row.prepare(weight), torch.tensor(places, dtype=torch.int64) % out
    want = row.values(prepared)
    assert torch.equal(row.rows(prepared, found, columns), want[found])
    assert torch.equal(row.rows(prepared, found.int().view(1, -1), columns), want[found].unsqueeze(0))
    scales = row.scales(prepared)
    restored = row.restore(prepared)
    assert torch.equal(restored, want if scales is None else want.float() * scales)
    for wrong in (-1, out):
        with pytest.raises(KernelError, match="rows of the weight"):
            row.rows(prepared, torch.tensor([0, wrong]), columns)
    with pytest.raises(KernelError, match="bytes made for another kernel"):
        row.rows(prepared, found, columns + 1)


@each_row(LOOKED_UP, "row")
def test_rows_are_looked_up_by_whole_numbers_alone(row: PanelMatmul) -> None:
    prepared = row.prepare(operands(1, 40, 6)[1])
    for dtype in (torch.float32, torch.bool, torch.uint8, torch.int16, torch.complex64):
        ids = torch.zeros(3, dtype=dtype)
        for look_up in (
            lambda ids: row.rows(prepared, ids, 6),
            lambda ids: torch.ops.twofour.rows(prepared.tensor, ids, row.name, 6),
            lambda ids: torch.ops.twofour.rows(prepared.tensor.to("meta"), ids.to("meta"), row.name, 6),
        ):
            with pytest.raises(KernelError, match=rf"(?s)got +{dtype}.*int64 or int32.*ids\.long\(\)"):
                look_up(ids)


@each_row(LOOKED_UP, "row")
def test_rows_of_a_weight_of_another_width_are_refused_with_the_weights_own_rows(row: PanelMatmul) -> None:
    prepared = row.prepare(operands(1, 40, 6)[1])
    for ids in (torch.tensor(1), torch.tensor([[1, 2, 3]])):
        with pytest.raises(KernelError, match=r"\(40, 7\)"):
            row.rows(prepared, ids, 7)


@each_row(BF16, "row")
@settings(max_examples=15, deadline=None)
@given(*SIZES, st.booleans())
def test_halves_of_any_sizes(row: Kernel, tokens: int, out: int, columns: int, team: int, low: bool) -> None:
    """Within 2 eps K^0.5 (|x||w| + |bias|) of the rounded operands' product; in bfloat16 2^-8 of it besides."""
    x, weight, bias = operands(tokens, out, columns)
    with threads(team):
        y = row.run(x.bfloat16() if low else x, row.prepare(weight), bias, Problem(out))
    inputs, held = x.bfloat16().double(), weight.bfloat16().double()
    want, size = inputs @ held.T + bias, inputs.abs() @ held.abs().T + bias.abs()
    assert ((y.double() - want).abs() <= 2**-22 * size * columns**0.5 + (2**-8 * want.abs() if low else 0)).all()


@each_row([*INT8, *BF16], "row")
def test_several_chunks_of_tokens(row: Kernel) -> None:
    tokens, out, columns = 900, 33, 1100
    x, weight, bias = operands(tokens, out, columns)
    prepared, first = row.prepare(weight), None
    for team in (1, 3):
        with threads(team):
            y = row.run(x, prepared, bias, Problem(out))
        first = y if first is None else first
        assert torch.equal(y, first)
        few = torch.cat([row.run(part, prepared, bias, Problem(out)) for part in x.split(7)])
        torch.testing.assert_close(y, few, rtol=1e-4, atol=1e-4)


@each_row(INT8, "row")
@in_turn("dtype", [torch.uint8, torch.int8, torch.bfloat16])
def test_answers_and_epilogues_of_whole_numbers(row: Kernel, dtype: torch.dtype) -> None:
    x, weight, bias = operands(9, 37, 50)
    zero = 100 if dtype is torch.uint8 else 3 if dtype is torch.int8 else 0
    quantization = Quantization(0.03, 90, dtype, 0.25 if zero else 1.0, zero)
    other = torch.randn(9, 37)
    given = (x * 30 + 90).round().clamp(0, 255).to(torch.uint8)
    epilogue = Epilogue("relu", "add")
    y = row.run(given, row.prepare(weight), bias, Problem(37, epilogue, quantization=quantization), other)
    want = nm_matmul_int8_reference(given, whole(weight), bias, quantization, epilogue, other)
    assert y.dtype == dtype and (y.float() - want.float()).abs().max() <= (1 if zero else 0.5)


@each_row([*INT8, *BF16], "row")
def test_a_token_that_is_no_number_is_lost_alone(row: Kernel) -> None:
    x, weight, bias = operands(20, 40, 33)
    prepared = row.prepare(weight)
    want = row.run(x, prepared, bias, Problem(40))
    x[3, 32], x[11, 0] = torch.nan, torch.inf
    y = row.run(x, prepared, bias, Problem(40))
    assert not y[[3, 11]].isfinite().any()
    others = [index for index in range(20) if index not in (3, 11)]
    assert torch.equal(y[others], want[others])


@each_row([*INT8, *BF16], "row")
def test_a_weight_comes_back_as_it_was_rounded(row: Kernel) -> None:
    for out, columns in ((1, 1), (32, 8), (33, 70)):
        weight = torch.randn(out, columns)
        prepared = row.prepare(weight)
        found = row.restore(prepared)
        assert torch.equal(
            found.double(), (whole(weight).unpack() if row.dtype == "int8" else weight.bfloat16()).double()
        )
        assert torch.equal(prepared.copy().restore(), found) and prepared.nbytes == row.least_bytes(out, columns)


def test_bytes_of_another_weight_and_sums_that_may_overflow_are_refused() -> None:
    row, other = INT8[0], BF16[0]
    with pytest.raises(KernelError, match=r"bytes made for another kernel(.|\n)*int8_dense"):
        row.run(torch.randn(3, 8), other.prepare(torch.randn(4, 8)), None, Problem(4))
    cut = row.prepare(torch.randn(4, 8)).tensor[:-64].clone()
    with pytest.raises(KernelError, match="as many bytes as its header says"):
        row.run(torch.randn(3, 8), row.prepare(torch.randn(4, 8)).__class__(row, cut), None, Problem(4))
    wide = torch.randn(2, LARGEST_REDUCTION // 2 + 1)
    assert not any(isinstance(one, Int8Panels) for one in candidates(wide, "int8"))
    with pytest.raises(KernelError, match="no int8 kernel takes this weight"):
        candidates(wide, "int8", native_alone=True)
    with pytest.raises(KernelError, match=r"may exceed int32(.|\n)*at most 65536"):
        INT8[0].prepare(wide)
