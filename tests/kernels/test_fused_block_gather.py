"""Fused blocks that read rows of tables which another input chooses, against indexing in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.conftest import threads
from tests.kernels.test_fused_block import ROWS, layer_norm, poisoned, run
from tests.turns import in_turn
from twofour import native
from twofour.errors import KernelError
from twofour.kernels.fused_block import Expression, fused_block_reference, program


@in_turn("row", ROWS, ids=lambda row: row.name)
@in_turn(("rows", "width"), [(1, 7), (37, 64), (9, 50), (100, 32), (3, 2048), (2, 5000), (5, 1)])
@in_turn("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_tables(row: native.NativeRow, rows: int, width: int, dtype: torch.dtype) -> None:
    """Of two tables, one strided, chosen by numbers of any strides: in a sum, normalised, and by themselves."""
    generator = torch.Generator().manual_seed(rows)
    expression = Expression()
    word, kind, position = expression.gather(), expression.gather(), expression.load()
    moved = expression.apply("add", expression.apply("add", word, kind), position)
    expression.store(moved)
    expression.store(layer_norm(expression, moved, word, position))
    expression.store(expression.apply("exp", kind))
    tables = torch.randn(11, width, generator=generator), torch.randn(3, 2 * width, generator=generator)[:, ::2]
    chosen = torch.randint(11, (rows, 2, 1), generator=generator), torch.randint(3, (2, rows), generator=generator).T
    inputs = [tables[0].to(dtype), chosen[0], tables[1].to(dtype), chosen[1].unsqueeze(-1)]
    inputs.append(torch.randn(2, width, generator=generator))
    shape = (rows, 2, width)
    outputs = [torch.full(shape, torch.nan) for _ in range(3)]
    with threads(2 if rows > 9 else 1):
        found = run(row, expression, inputs, outputs)
    for got, want in zip(found, fused_block_reference(expression, inputs, torch.float64), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3 if width == 1 else 1e-4)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (torch.tensor([[0], [11]]), r"row that its table has not(.|\n)*11(.|\n)*0 to 10"),
        (torch.tensor([[0], [-1]]), "row that its table has not"),
        (torch.tensor([[0.0], [1.0]]), r"torch\.int64"),
        (torch.tensor([[0, 1], [1, 2]]), "a last axis of 1"),
    ],
)
def test_rows_that_a_table_has_not_are_refused(chosen: Tensor, message: str) -> None:
    expression = Expression()
    expression.store(expression.apply("exp", expression.gather()))
    made, answer = program(expression), torch.full((2, 4), torch.nan)
    with pytest.raises(KernelError, match=message):
        made.run(native.best("fused_block").index, [torch.randn(11, 4), chosen], [answer], 1)
    with pytest.raises(KernelError, match="two axes"):
        made.run(native.best("fused_block").index, [torch.randn(4), torch.tensor([[0], [0]])], [answer], 1)
    assert answer.isnan().all()


@pytest.mark.parametrize("gathers", [[(0, 0)], [(1, 0)], [(0, 2)], [(-1, 1)], [(0, 1), (0, 1)], [(0, 1), (1, 1)]])
def test_programs_that_gather_from_no_table_are_refused(gathers: list[tuple[int, int]]) -> None:
    lines = [("load", 0, 0, 0, 0, 0.0), ("store", 0, 0, 0, 0, 0.0)]
    with pytest.raises(KernelError, match="gathers rows of what is no input"):
        native.extension().BlockProgram(lines, [(0, 2, False)], [False], 0, 2, 1, gathers)


def test_numbers_of_rows_are_loaded_by_no_step() -> None:
    lines = [("load", 0, 1, 0, 0, 0.0), ("store", 0, 0, 0, 0, 0.0)]
    with pytest.raises(KernelError, match="reads or writes what is not there"):
        native.extension().BlockProgram(lines, [(0, 2, False)], [False], 0, 2, 1, [(0, 1)])


def test_poison_of_a_table_stays_in_its_rows() -> None:
    expression = Expression()
    expression.store(expression.apply("mul", expression.gather(), 2.0))
    table, chosen = torch.ones(3, 20), torch.tensor([[0], [2], [0]])
    table[1:] = torch.nan
    (found,) = run(ROWS[-1], expression, [table, chosen], poisoned(expression, [torch.empty(3, 20)]))
    assert torch.equal(found.isnan().any(1), torch.tensor([False, True, False]))
