"""The dense bfloat16 rows: input and answer of both dtypes, with bias and epilogue."""

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from tests.turns import in_turn
from twofour.compiler.layer import PreparedWeights
from twofour.kernels.base import Prepared
from twofour.kernels.dense_matmul import ONEDNN_BF16, PLAIN, PLAIN_BF16, Bf16Matmul
from twofour.kernels.dense_matmul.bf16 import reads_past_rows
from twofour.kernels.dense_matmul.plain import PlainMatmul
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.problem import Problem
from twofour.packing import pack
from twofour.patterns import parse


@pytest.mark.parametrize("row", [PLAIN_BF16, ONEDNN_BF16], ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_round_no_more_than_their_operands_and_answer(row: Bf16Matmul, dtype: torch.dtype) -> None:
    if reason := row.unavailable():
        pytest.skip(reason)
    weight = torch.randn(48, 64) * 64**-0.5
    weight *= parse("2:4").project(weight, absolute=True)
    bias, other = torch.randn(48), torch.randn(9, 48, dtype=dtype)
    x = torch.randn(9, 64, dtype=dtype)
    for given in (weight, pack(weight, "2:4", dtype="bfloat16")):
        prepared = row.prepare(given)
        assert prepared.nbytes >= row.least_bytes(48, 64)
        y = row.run(x, prepared, bias, Problem(48))
        want = x.bfloat16().double() @ weight.bfloat16().double().T + bias.double()
        assert y.dtype == dtype
        assert (y.double() - want).norm() <= 5e-3 * want.norm()
        y = row.run(x, prepared, bias, Problem(48, Epilogue("silu", "multiply")), other)
        want = torch.nn.functional.silu(want) * other.double()
        assert y.dtype == dtype
        assert (y.double() - want).norm() <= 1e-2 * want.norm()


class ReadsPastRows(PlainMatmul):
    """A product as oneDNN makes it on some CPUs: the remainder of a row is read to the next multiple of 16."""

    def run(self, x: torch.Tensor, weight: Prepared, *rest: Any, **options: Any) -> torch.Tensor:
        y = super().run(x, weight, *rest, **options)
        step, memory = x.stride(0), torch.as_strided(x, (x.untyped_storage().nbytes() // 2,), (1,), 0)
        for row in range(len(x)):
            past = memory[row * step + x.shape[1] : row * step + x.shape[1] + -x.shape[1] % 16]
            y[row] += (past * 0).sum()
        return y


LEAKING = ReadsPastRows(**{field.name: getattr(PLAIN, field.name) for field in fields(PLAIN)})
WIDENED = replace(PLAIN_BF16, kernel=LEAKING)


def finite_rows(row: Bf16Matmul, columns: int, tokens: int, value: float, dtype: torch.dtype) -> list[int]:
    """Tokens answered with numbers, where number 10 % `tokens` holds a value that is none."""
    prepared = row.prepare(torch.randn(17, columns))
    memory = torch.full((tokens, columns + 40), value, dtype=dtype)
    x = memory[:, :columns].copy_(torch.randn(tokens, columns))
    assert row.run(x, prepared, None, Problem(17)).isfinite().all()
    x = x.contiguous()
    x[10 % tokens, 3] = value
    return row.run(x, prepared, None, Problem(17)).isfinite().all(1).nonzero().flatten().tolist()


@in_turn("value", [torch.nan, torch.inf])
@in_turn("columns", [7, 33, 48, 65, 96, 100, 1000])
@in_turn("row", [PLAIN_BF16, ONEDNN_BF16, WIDENED], ids=["torch", "onednn", "leak"])
def test_a_token_that_is_not_finite_leaves_the_others_alone(row: Bf16Matmul, columns: int, value: float) -> None:
    if reason := row.unavailable():
        pytest.skip(reason)
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (2, 33, 65):
            others = [token for token in range(tokens) if token != 10 % tokens]
            assert finite_rows(row, columns, tokens, value, dtype) == others


def test_a_leaking_product_is_found_widened_and_said_in_the_plan() -> None:
    assert reads_past_rows(LEAKING, 33) and reads_past_rows(LEAKING, 1000) and not reads_past_rows(LEAKING, 96)
    assert not reads_past_rows(LEAKING, 48)
    row, weight, bias = WIDENED, torch.randn(17, 100), torch.randn(17)
    assert row.remark(100) == "widened to 128 columns, or a NaN or infinity of one token would reach the token before"
    assert row.remark(96) == ""
    prepared = row.prepare(weight)
    assert prepared.tensor.shape == (17, 128)
    assert torch.equal(row.restore(prepared), weight.bfloat16())
    x = torch.randn(40, 100).bfloat16()
    want = PLAIN_BF16.run(x, PLAIN_BF16.prepare(weight), bias, Problem(17))
    torch.testing.assert_close(row.run(x, prepared, bias, Problem(17)), want)


def test_a_widened_weight_keeps_its_width_through_a_pickle() -> None:
    if reason := ONEDNN_BF16.unavailable():
        pytest.skip(reason)
    weight = torch.randn(16, 33)
    wide = [row.kernel.prepare(pad(weight.bfloat16(), (0, 31))) for row in (PLAIN_BF16, ONEDNN_BF16)]
    rows = (PLAIN_BF16, ONEDNN_BF16)
    held = PreparedWeights([replace(part, kernel=row, columns=33) for row, part in zip(rows, wide, strict=True)])
    back = pickle.loads(pickle.dumps(held))
    assert torch.equal(held.source(), weight.bfloat16())
    assert torch.equal(back.source(), weight.bfloat16())
    x = torch.randn(5, 33)
    for row, part in zip(rows, back.weights, strict=True):
        torch.testing.assert_close(row.run(x, part, None, Problem(16)), x @ weight.T, atol=0.2, rtol=0.02)
