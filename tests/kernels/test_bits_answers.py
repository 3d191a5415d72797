"""Answers of a product of codes as codes of the next one, and those as inputs."""

from __future__ import annotations

import itertools
from copy import copy
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch.nn import functional

from tests.conftest import each_row, threads
from tests.kernels.bits_cases import PLAIN, codes_of, generator, made_for, real, weight_of
from tests.turns import in_turn
from twofour.compiler.code_steps import UnfitError, coded_answer
from twofour.errors import KernelError
from twofour.kernels.bits_matmul import (
    GROUPS,
    BitsMatmul,
    BitsProblem,
    BitWeight,
    CodedAnswer,
    bits_matmul_reference,
    bits_rows,
    float_of,
    twos,
    unsigned,
)
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.quantization import Quantization, quantize_input

AFTER = {
    "plain": (Quantization.of_range(-2.0, 9.0, 8), []),
    "relu": (Quantization.of_range(-1.0, 8.0, 5), [torch.relu]),
    "clip": (Quantization.of_range(-3.0, 3.0, 4, "twos"), [partial(torch.clamp, min=-0.5, max=2.0)]),
    "odd": (Quantization.of_range(-3.0, 3.0, 3, "bipolar"), []),
    "sigmoid": (Quantization.of_range(-0.1, 1.0, 8), [torch.sigmoid]),
    "gelu": (Quantization.of_range(-0.17, 4.0, 8), [functional.gelu]),
    "gelu_tanh": (Quantization.of_range(-0.17, 2.0, 6), [partial(functional.gelu, approximate="tanh")]),
    "silu": (Quantization.of_range(-0.3, 9.0, 8), [functional.silu]),
}
"""Ranges of a next product's inputs, and what stands before them."""

ROWS = 32
"""As many make tensors without a last few numbers, of which torch computes some activations by other code."""


@cache
def answer_of(kind: str, affine: bool = False, formula: bool = True) -> CodedAnswer:
    numbers = torch.stack([torch.linspace(-1, 2, 35), torch.linspace(1, -1, 35)]) if affine else None
    after, applied = AFTER[kind]
    return coded_answer(applied, after, 1e3, numbers, kind if formula else "none")


@each_row(bits_rows())
def test_answers_become_the_codes_that_operators_make(row: BitsMatmul) -> None:
    columns = 64 if row.layout == GROUPS else 71
    weight, x, bias = made_for(row, twos(4), 35, columns), 0.03 * real(ROWS, columns), torch.linspace(-3, 3, 35)
    x[4, 7], quantization = float("nan"), replace(Quantization.of_range(-3.0, 3.5, 7), x_scale=5e-4)
    y, prepared, alone = (
        bits_matmul_reference(x, weight, bias, quantization),
        row.prepare(weight),
        torch.arange(ROWS) != 4,
    )
    for kind, (affine, formula, count) in itertools.product(
        AFTER, ((False, True, 1), (True, True, 3), (False, False, 3))
    ):
        answer = answer_of(kind, affine, formula)
        with threads(count):
            problem = BitsProblem(35, Epilogue(answer.activation), quantization, answer=answer)
            rows = row.run(x, prepared, bias, problem)
        want = answer.rows(y)
        assert torch.equal(rows[alone], want[alone]) and rows[4, 35] == 1 and int(rows.max()) <= answer.after.most
        normed = y if answer.affine is None else (y.double() * answer.affine[0] + answer.affine[1]).float()
        for apply in AFTER[kind][1]:
            normed = apply(normed)
        assert torch.equal(quantize_input(normed, answer.after)[0][alone], want[alone, :35])


@each_row(bits_rows())
def test_rows_of_codes_are_read_as_their_numbers_and_a_marked_one_is_nan(row: BitsMatmul) -> None:
    columns = 64 if row.layout == GROUPS else 35
    weight, y = made_for(row, twos(2), 11, columns), 3 * real(ROWS, columns)
    y[2, 3], prepared = float("nan"), row.prepare(weight)
    for kind, (after, applied) in AFTER.items():
        x = y
        for apply in applied:
            x = apply(x)
        for count in (1, 3):
            with threads(count):
                problem = BitsProblem(11, quantization=after, coded=True)
                got = row.run(answer_of(kind).rows(y), prepared, None, problem)
            want = bits_matmul_reference(x, weight, None, after)
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)) and got[2].isnan().all(), kind


@each_row([row for row in bits_rows() if row.layout == GROUPS])
def test_many_tokens_of_codes_become_codes_where_panels_are_taken_apart_once(row: BitsMatmul) -> None:
    """From kManyTokens of groups.h on; 131 leave a rest of each tile."""
    quantization, codes = replace(Quantization.of_range(-3.0, 3.5, 7), x_scale=5e-4), codes_of(7, 131, 64)
    marks, alone = torch.zeros(131, 1, dtype=torch.uint8), torch.arange(131) != 77
    marks[77] = 1
    weight, bias = made_for(row, twos(4), 35, 64), torch.linspace(-3, 3, 35)
    x, y, prepared = (
        torch.cat([codes, marks], 1),
        bits_matmul_reference(codes, weight, bias, quantization),
        row.prepare(weight),
    )
    for kind, (affine, count) in itertools.product(AFTER, ((False, 1), (True, 3))):
        answer = answer_of(kind, affine)
        problem = BitsProblem(35, Epilogue(answer.activation), quantization, coded=True, answer=answer)
        with threads(count):
            rows = row.run(x, prepared, bias, problem)
        assert torch.equal(rows[alone], answer.rows(y)[alone]) and rows[77, 35] == 1, (kind, affine)
        assert len(rows.unique()) > 3


@each_row([row for row in bits_rows() if row.layout in ("bits_bytes", GROUPS)])
@in_turn(
    ("kind", "formula"),
    [("odd", False), ("sigmoid", False), ("gelu", False), ("gelu", True), ("gelu_tanh", True), ("silu", True)],
)
def test_codes_change_at_the_floats_at_which_the_operators_change_them(
    row: BitsMatmul, kind: str, formula: bool
) -> None:
    """An input of zeros makes answers of biases: any float."""
    answer, (after, applied) = answer_of(kind, False, formula), AFTER[kind]
    assert answer.steps is not None and (answer.activation == kind) is formula
    begin = answer.steps.begin[answer.steps.above != answer.steps.below].unique().long()
    beside = float_of((begin[:, None] + torch.tensor([-300, -2, -1, 0, 1, 2, 30, 99, 255, 256, 400])).flatten())
    spread, ends = 4 * torch.randn(500 + -len(beside) % ROWS, generator=generator(1)), [0.0, -0.0, 999.0, -999.0]
    bias = torch.cat([beside, spread, torch.tensor(ends * 3)])
    assert len(bias) % ROWS == 0
    weight = BitWeight(torch.zeros(len(bias), 32, dtype=torch.uint8), unsigned(1), torch.ones(len(bias)))
    if row.layout == GROUPS:
        weight = BitWeight(weight.codes, unsigned(1), torch.ones(len(bias), 1))
    problem = BitsProblem(len(bias), Epilogue(answer.activation), Quantization(1.0, 0), answer=answer)
    want = bias
    for apply in applied:
        want = apply(want)
    rows = row.run(torch.zeros(5, 32), row.prepare(weight), bias, problem)
    assert torch.equal(rows[:, :-1], quantize_input(want, after)[0].expand(5, -1)) and not rows[:, -1].any()


def test_answers_that_cannot_be_codes_are_refused() -> None:
    with pytest.raises(KernelError, match="an answer cannot become such codes"):
        CodedAnswer(Quantization(bits=4))
    with pytest.raises(KernelError, match="an answer cannot become such codes"):
        CodedAnswer(Quantization(1.0, bits=4))
    for swallows in (torch.nan_to_num, torch.sign, torch.sgn):
        with pytest.raises(UnfitError, match="makes numbers of NaN"):
            coded_answer([swallows, torch.relu], AFTER["plain"][0], 10.0)
    with pytest.raises(UnfitError, match="answers NaN"):
        coded_answer([functional.gelu], AFTER["gelu"][0], float("inf"))
    with pytest.raises(UnfitError, match=r"too often|too close"):
        coded_answer([lambda x: torch.sin(1e4 * x)], AFTER["gelu"][0], 10.0)
    row = next(row for row in PLAIN if row.unavailable() is None)
    weight, answer = row.prepare(weight_of(twos(2), 11, 35)), answer_of("gelu")
    assert answer.operands[1] is not None
    table = answer.operands[1]
    for broken in (table[:-1], torch.cat([table[:12], table[12:].clone().fill_(255)]), table[:8]):
        other = copy(answer)
        object.__setattr__(other, "operands", (None, broken.clone()))
        with pytest.raises(KernelError, match="steps"):
            row.run(real(3, 35), weight, None, BitsProblem(11, quantization=Quantization(bits=4), answer=other))
    some = answer_of("gelu_tanh")
    assert some.steps is not None and some.operands[1] is not None and some.after.most == 63
    for step, damage in itertools.product(
        (0, len(some.steps.begin) - 1), ({2: 255, 3: 127}, {4: 64}, {5: 64}, {6: 255}, {7: 255})
    ):
        other, broken = copy(some), some.operands[1].clone()  # a head of 16 bytes, 8 of each step
        for place, byte in damage.items():
            broken[16 + 8 * step + place] = byte
        object.__setattr__(other, "operands", (None, broken))
        with pytest.raises(KernelError, match=r"steps(.|\n)*codes of the answer, rows of bits that are there"):
            row.run(real(3, 35), weight, None, BitsProblem(11, quantization=Quantization(bits=4), answer=other))
    with pytest.raises(KernelError, match=r"does not fit|made for another"):
        row.run(codes_of(4, 3, 35), weight, None, BitsProblem(11, quantization=Quantization(1.0, bits=4), coded=True))
