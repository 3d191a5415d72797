"""Operands of bfloat16 that fused blocks read and write where they stand, against float64."""

from __future__ import annotations

import torch

from tests.kernels.test_fused_block import ROWS, operands, poisoned, run
from tests.turns import in_turn
from twofour import native
from twofour.kernels.fused_block import Expression, fused_block_reference


@in_turn("row", ROWS, ids=lambda row: row.name)
@in_turn("shape", [(7, 16), (37, 64), (3, 128), (5, 50), (2, 2048), (2, 4096), (16, 3)])
@in_turn("stores", range(4))
def test_bfloat16_is_read_and_written_where_it_stands(
    row: native.NativeRow, shape: tuple[int, ...], stores: int
) -> None:
    """As the first and the second operand, of cheap steps and others; a number that others read is rounded for none."""
    expression = Expression()
    x, y = expression.load(), expression.load()
    made = expression.apply("add", expression.apply("mul", x, y), 0.5)
    values = [
        [expression.apply("sub", y, x)],  # one step by itself
        [expression.apply("amax", x), expression.apply("sum", made)],
        [made, expression.apply("mul", made, made), expression.apply("exp", expression.apply("neg", made))],
        [expression.apply("div", x, expression.apply("sum", expression.apply("exp", y))), expression.apply("tanh", x)],
    ][stores]
    for value in values:
        expression.store(value)
    inputs = [tensor.bfloat16() for tensor in operands(shape, shape)]
    exact = fused_block_reference(expression, inputs, torch.float64)
    for dtype, tolerance in ((torch.bfloat16, 2**-8), (torch.float32, 1e-5)):
        found = run(row, expression, inputs, poisoned(expression, inputs, dtype))
        for got, want in zip(found, exact, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-5)


@in_turn("row", ROWS, ids=lambda row: row.name)
@in_turn("width", [16, 32, 48, 50, 64, 128, 144, 1000])
@in_turn("dtype", [torch.float32, torch.bfloat16])
def test_what_every_row_has_is_read_again(row: native.NativeRow, width: int, dtype: torch.dtype) -> None:
    """A weight and a bias of several tiles of rows, as first and second operand, beside sums of rows and without."""
    expression = Expression()
    x, weight, bias = expression.load(), expression.load(), expression.load()
    apart = expression.apply("sub", x, expression.apply("over_width", expression.apply("sum", x)))
    expression.store(expression.apply("add", expression.apply("mul", apart, weight), bias))
    expression.store(expression.apply("maximum", expression.apply("sub", weight, x), bias))
    expression.store(expression.apply("amax", expression.apply("mul", weight, apart)))
    inputs = [tensor.to(dtype) for tensor in operands((2 * 4096 // width + 3, width), (width,), (1, width))]
    exact = fused_block_reference(expression, inputs, torch.float64)
    tolerance = 2**-8 if dtype is torch.bfloat16 else 1e-5
    before = native.extension().block_streams_from(0)
    try:
        for _ in range(2):  # past the caches, and through them
            found = run(row, expression, inputs, poisoned(expression, inputs, dtype))
            for got, want in zip(found, exact, strict=True):
                torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-5)
            native.extension().block_streams_from(1 << 40)
    finally:
        native.extension().block_streams_from(before)
