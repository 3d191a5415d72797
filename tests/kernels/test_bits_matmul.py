"""Products of codes of 1 to 8 bits: bit for bit those of whole numbers, for every pair of widths and every system."""

from __future__ import annotations

import itertools
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.conftest import each_row, threads
from tests.turns import in_turn
from twofour.compiler.code_steps import UnfitError, coded_answer
from twofour.errors import KernelError
from twofour.kernels.bits_matmul import (
    GROUPS,
    TERNARY,
    BitsMatmul,
    BitsProblem,
    BitWeight,
    CodedAnswer,
    Levels,
    bipolar,
    bits_matmul_reference,
    bits_rows,
    float_of,
    from_layout,
    to_layout,
    twos,
    unsigned,
    whole_product,
)
from twofour.kernels.bits_matmul.layout import LAYOUTS, OF_2X4
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import LEVELS, Quantization, quantize_input
from twofour.patterns import parse

SYSTEMS = {"unsigned": unsigned, "twos": twos, "bipolar": bipolar}
EVERY = [make(bits) for bits in range(1, 9) for make in SYSTEMS.values()] + [TERNARY]
WIDTHS = range(1, 9)
KEPT = [row for row in bits_rows() if row.sparse]
"""Rows of 2:4 weights."""
DENSE = [row for row in bits_rows() if not row.sparse]
PLAIN = [row for row in DENSE if row.layout != GROUPS]
"""Dense rows of weights with one scale an output; test_bits_groups.py has the others."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def weight_of(levels: Levels, out: int, columns: int, scale: float | None = None) -> BitWeight:
    most = 2 if levels == TERNARY else levels.most
    codes = torch.randint(0, most + 1, (out, columns), generator=generator(columns), dtype=torch.uint8)
    scales = torch.rand(out, generator=generator(out)) + 0.5 if scale is None else torch.full((out,), scale)
    return BitWeight(codes, levels, scales)


@cache
def codes_of(bits: int, tokens: int, columns: int) -> Tensor:
    return torch.randint(0, 1 << bits, (tokens, columns), generator=generator(tokens), dtype=torch.uint8)


@cache
def real(tokens: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(tokens, columns, generator=generator(tokens)) + 0.3).to(dtype)


def fitting(row: BitsMatmul) -> list[Levels]:
    return [levels for levels in EVERY if row.refuses_levels(levels, 4, Quantization()) is None]


@cache
def inputs(tokens: int, columns: int) -> list[tuple[Problem, Tensor, Tensor]]:
    """Codes of every width and system: the problem of 35 outputs, the codes, and the whole numbers they stand for."""
    found = []
    for bits, system in itertools.product(WIDTHS, LEVELS):
        zero = (1 << bits) // 3 if system == "unsigned" else 0
        quantization = Quantization(1.0, zero, bits=bits, levels=system)
        x = codes_of(bits, tokens, columns)
        whole = x.long() * quantization.factor - quantization.zero
        found.append((Problem(35, quantization=quantization), x, whole))
    return found


@each_row(PLAIN)
def test_codes_give_the_whole_product_for_every_pair_of_widths_and_system(row: BitsMatmul) -> None:
    for levels in fitting(row):
        weight = weight_of(levels, 35, 71, 1.0)
        prepared, values = row.prepare(weight), weight.values().long().T
        for problem, x, whole in inputs(5, 71):
            want = whole @ values
            assert want.abs().max() < 1 << 24  # which float32 holds
            assert torch.equal(row.run(x, prepared, None, problem).long(), want), (levels, problem)


LEVELS_OF_INPUTS = {
    "unsigned": lambda u, bits: u - (1 << bits) // 3,  # less the zero point that is asked for
    "twos": lambda u, bits: u - (1 << (bits - 1)),
    "bipolar": lambda u, bits: 2 * u - ((1 << bits) - 1),
}
"""What codes stand for, by the table of the README."""


@in_turn("bits", WIDTHS)
@in_turn("system", LEVELS)
def test_codes_stand_for_the_levels_of_their_system(system: str, bits: int) -> None:
    """The products above take factor and zero point from `Quantization`: these are the numbers themselves."""
    codes = torch.arange(1 << bits)
    for problem, _, _ in inputs(5, 71):
        if (problem.quantization.bits, problem.quantization.levels) == (bits, system):
            quantization = problem.quantization
            found = codes * quantization.factor - quantization.zero
            assert torch.equal(found, LEVELS_OF_INPUTS[system](codes, bits))
    weight = BitWeight(codes.to(torch.uint8)[None], SYSTEMS[system](bits), torch.ones(1))
    shift = (1 << bits) // 3 if system == "unsigned" else 0
    assert torch.equal(weight.values()[0].long(), LEVELS_OF_INPUTS[system](codes, bits) + shift)


@each_row(PLAIN)
def test_many_panels_of_outputs(row: BitsMatmul) -> None:
    """More than one panel of tables, and more than a thread's scratch holds at first: 256 outputs, 16 panels."""
    for out, levels, bits in ((600, twos(2), 8), (4200, bipolar(1), 2)):
        weight, quantization = weight_of(levels, out, 71), Quantization(bits=bits)
        bias, x, prepared = torch.randn(out, generator=generator(1)), real(5, 71), row.prepare(weight)
        want = bits_matmul_reference(x, weight, bias, quantization)
        for count in (1, 3):
            with threads(count):
                y = row.run(x, prepared, bias, Problem(out, quantization=quantization))
            assert torch.equal(y, want), (levels, count)


@each_row(bits_rows())
def test_tokens_of_several_passes(row: BitsMatmul) -> None:
    """A pass takes 4 MB of tokens, and a token of 8 bits 256 bytes at least."""
    weight, quantization, x = made_for(row, twos(4 if row.sparse else 2), 9, 64), Quantization(bits=8), real(17_000, 64)
    if row.layout == GROUPS:
        weight = BitWeight(weight.codes, weight.levels, torch.rand(9, 2) + 0.1)
    for count in (1, 3):
        with threads(count):
            y = row.run(x, row.prepare(weight), None, Problem(9, quantization=quantization))
        assert torch.equal(y, bits_matmul_reference(x, weight, None, quantization))


@each_row(PLAIN)
@in_turn("columns", [63, 260, 1027])
def test_real_inputs_are_rounded_as_the_reference_does(row: BitsMatmul, columns: int) -> None:
    bias = torch.randn(70, generator=generator(1))
    for levels, bits in ((bipolar(1), 1), (twos(2), 2), (TERNARY, 8), (unsigned(4), 3), (twos(8), 4), (bipolar(3), 7)):
        if row.refuses_levels(levels, columns, Quantization(bits=bits)):
            continue
        weight = weight_of(levels, 70, columns)
        prepared = row.prepare(weight)
        for system, tokens in zip(LEVELS, (1, 9, 14), strict=True):
            for scale, dtype in ((None, torch.float32), (0.25, torch.bfloat16)):
                quantization = Quantization(scale, bits=bits, levels=system)
                x = real(tokens, columns, dtype)
                y = row.run(x, prepared, bias, Problem(70, quantization=quantization))
                assert y.dtype == dtype
                assert torch.equal(y, bits_matmul_reference(x, weight, bias, quantization)), (levels, quantization)


@each_row(DENSE)
def test_threads_epilogues_strides_and_answers_of_bytes(row: BitsMatmul) -> None:
    weight = weight_of(twos(2), 203, 131)
    prepared, bias = row.prepare(weight), torch.randn(203, generator=generator(1))
    x, other = real(37, 262)[:, ::2], real(37, 203)
    want = bits_matmul_reference(x, weight, bias, Quantization(bits=2))
    with threads(3):
        for epilogue, expected in (
            (Epilogue(), want),
            (Epilogue("relu"), want.relu()),
            (Epilogue("none", "add"), want + other),
            (Epilogue("relu", "multiply"), want.relu() * other),
        ):
            second = None if epilogue.combine == "none" else other
            y = row.run(x, prepared, bias, Problem(203, epilogue, Quantization(bits=2)), second)
            assert torch.equal(y, expected)
    for dtype, zero in ((torch.uint8, 3), (torch.int8, -5)):
        quantization = Quantization(bits=2, y_dtype=dtype, y_scale=0.5, y_zero=zero)
        y = row.run(x.reshape(37, 1, 131).contiguous(), prepared, bias, Problem(203, quantization=quantization))
        assert torch.equal(y[:, 0], bits_matmul_reference(x, weight, bias, quantization))


@each_row(DENSE)
def test_a_token_with_nan_is_nan_alone_in_a_static_range_too(row: BitsMatmul) -> None:
    weight, static, x = weight_of(twos(2), 35, 40), Quantization(0.25, bits=4), real(4, 40).clone()
    x[1, 39], x[3, 0] = float("nan"), float("inf")
    y = row.run(x, row.prepare(weight), None, Problem(35, quantization=static))
    assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()
    assert torch.equal(y.nan_to_num(9.0), bits_matmul_reference(x, weight, None, static).nan_to_num(9.0))


@each_row(DENSE)
def test_nan_is_the_least_number_of_an_answer_of_bytes(row: BitsMatmul) -> None:
    weight, x = weight_of(twos(2), 35, 40), real(4, 40).clone()
    x[1, 39], x[3, 0] = float("nan"), float("inf")
    for scale, (dtype, least) in itertools.product((None, 0.25), ((torch.uint8, 0), (torch.int8, -128))):
        quantization = Quantization(scale, bits=4, y_dtype=dtype, y_scale=0.5, y_zero=100)
        y = row.run(x, row.prepare(weight), torch.ones(35), Problem(35, quantization=quantization))
        assert (y[1] == least).all() and torch.equal(y, bits_matmul_reference(x, weight, torch.ones(35), quantization))


@each_row(DENSE)
def test_a_token_that_is_not_finite_is_nan_alone(row: BitsMatmul) -> None:
    weight = weight_of(bipolar(1), 20, 40)
    for system, bad in itertools.product(LEVELS, (float("nan"), float("inf"), float("-inf"))):
        x = real(4, 40).clone()
        x[2, 7] = bad
        quantization = Quantization(bits=2, levels=system)
        y = row.run(x, row.prepare(weight), None, Problem(20, quantization=quantization))
        assert y[2].isnan().all()
        want = bits_matmul_reference(real(4, 40), weight, None, quantization)
        assert torch.equal(y[[0, 1, 3]], want[[0, 1, 3]])


@each_row(PLAIN)
def test_the_longest_sum_that_is_accepted_fits_and_a_longer_one_is_refused(row: BitsMatmul) -> None:
    for levels, bits, system in itertools.product((unsigned(1), TERNARY, twos(8), bipolar(8)), (1, 8), LEVELS):
        quantization = Quantization(1.0, bits=bits, levels=system)
        longest = levels.longest(quantization)
        if row.layout == "bits_packed" and levels.bits > 4:
            continue
        reason = row.refuses_levels(levels, longest + 1, quantization)
        assert reason is not None and str(longest) in reason
        assert row.refuses_levels(levels, longest, quantization) is None
        if longest < 40_000:
            wide = BitWeight(torch.ones(1, longest + 1, dtype=torch.uint8), levels, torch.ones(1))
            with pytest.raises(KernelError, match="int32 holds"):
                row.run(torch.zeros(1, longest + 1), row.prepare(wide), None, Problem(1, quantization=quantization))
        if longest > 40_000:
            continue
        ends = torch.tensor([[0, quantization.most]], dtype=torch.uint8).T.expand(2, longest).contiguous()
        weight = BitWeight((ends > 0).to(torch.uint8) * levels.most, levels, torch.ones(2))
        y = row.run(ends, row.prepare(weight), None, Problem(2, quantization=quantization))
        whole = whole_product(ends, weight, quantization)[0]
        assert whole.abs().max() <= (1 << 31) - 1 and torch.equal(y, whole.float())


@each_row([row for row in PLAIN if row.tokens_most > 64])
def test_blocks_of_tokens_and_long_rows_are_whole(row: BitsMatmul) -> None:
    columns, out = 6203, 261  # more than one slab of inputs and panel of outputs, the last ones ragged
    for levels, bits in ((bipolar(1), 1), (twos(2), 4), (TERNARY, 7), (unsigned(1), 8)):
        weight, quantization = weight_of(levels, out, columns, 1.0), Quantization(1.0, bits=bits)
        x, prepared = codes_of(bits, 67, columns), row.prepare(weight)
        want = (x.double() @ weight.values().double().T).float()
        assert want.abs().max() < 1 << 24
        for count in (67, 8, 4, 3, 2, 1):  # few tokens make tables of more inputs at once
            y = row.run(x[:count], prepared, None, Problem(out, quantization=quantization))
            assert torch.equal(y, want[:count]), (levels, count)


@each_row([row for row in PLAIN if row.layout != "bits_packed"])
def test_greatest_sums_pass_16_bits(row: BitsMatmul) -> None:
    """Tables sum 16 bits over 65,535 / (6 * the greatest code) groups of 6 inputs: more groups, all at the greatest."""
    for bits, columns in ((4, 9001), (3, 10_001), (2, 24_001), (1, 66_001), (8, 13_001)):
        quantization, weight = Quantization(1.0, bits=bits), weight_of(unsigned(1), 1, columns, 1.0)
        weight = replace(weight, codes=torch.ones(1, columns, dtype=torch.uint8))
        x = torch.full((3, columns), quantization.most, dtype=torch.uint8)
        x[1] = 0
        y = row.run(x, row.prepare(weight), None, Problem(1, quantization=quantization))
        assert y.flatten().tolist() == [columns * quantization.most, 0, columns * quantization.most], bits


@each_row([row for row in PLAIN if row.layout == "bits_packed"])
def test_sums_of_places_are_shifted_before_they_pass_32_bits(row: BitsMatmul) -> None:
    columns, quantization = 300_001, Quantization(1.0, bits=8)  # 75,001 inputs a place, at 192 times 128
    x = torch.tensor([[0], [255]], dtype=torch.uint8).expand(2, columns).contiguous()
    for levels in (unsigned(1), twos(2), unsigned(4)):
        weight = BitWeight(torch.full((1, columns), levels.most, dtype=torch.uint8), levels, torch.ones(1))
        prepared = row.prepare(weight)
        for some in (x[:1], x[1:], x):
            y = row.run(some, prepared, None, Problem(1, quantization=quantization))
            assert torch.equal(y, whole_product(some, weight, quantization)[0].float())


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in OF_2X4])
def test_a_layout_gives_back_the_weight(layout: str) -> None:
    for levels, (out, columns) in itertools.product(EVERY, ((1, 1), (33, 65), (130, 300))):
        if layout == "bits_packed" and levels.bits > 4:
            continue
        weight = weight_of(levels, out, columns)
        again = from_layout(to_layout(weight, layout))
        assert again.levels == levels and torch.equal(again.codes, weight.codes)
        assert torch.equal(again.scales, weight.scales)


@cache
def kept_of(levels: Levels, out: int, columns: int, scale: float | None = None) -> BitWeight:
    """A weight that keeps two of four, and of the first four of each output one or none."""
    scores = torch.rand(out, -(-columns // 4) * 4, generator=generator(columns + 1))
    keep = parse("2:4").project(scores)
    keep[:, :4] &= scores[:, :4] > 0.5
    weight = weight_of(levels, out, columns, scale)
    codes = torch.where(keep[:, :columns], weight.codes, -levels.beta).to(torch.uint8)
    return BitWeight(codes, levels, weight.scales)


def made_for(row: BitsMatmul, levels: Levels, out: int, columns: int) -> BitWeight:
    return (kept_of if row.sparse else weight_of)(levels, out, columns)


def kept_levels(row: BitsMatmul) -> list[Levels]:
    return [levels for levels in EVERY if row.refuses_levels(levels, 4, Quantization(), pattern="2:4") is None]


@each_row(KEPT)
def test_2x4_gives_the_whole_product_for_every_width_and_gives_back_the_weight(row: BitsMatmul) -> None:
    found = kept_levels(row)
    halves = row.layout == "bits_2x4_packed"
    assert twos(4) in found and (twos(8) in found, TERNARY in found, unsigned(7) in found) == (not halves,) * 3
    for levels in found:
        weight = kept_of(levels, 35, 71, 1.0)
        assert weight.pattern == "2:4" and row.refuses_weight(weight, Quantization()) is None
        prepared, values = row.prepare(weight), weight.values().long().T
        again = row.restore(prepared)
        assert again.levels == levels and torch.equal(again.codes, weight.codes)
        assert torch.equal(again.scales, weight.scales)
        for problem, x, whole in inputs(5, 71):
            want = whole @ values
            assert want.abs().max() < 1 << 24
            assert torch.equal(row.run(x, prepared, None, problem).long(), want), (levels, problem)


@each_row(KEPT)
def test_2x4_takes_what_dense_rows_take(row: BitsMatmul) -> None:
    """Tokens of every tile, panels, threads, epilogues, answers of bytes, NaN, damage, a weight that is no 2:4."""
    levels = twos(4)
    weight = kept_of(levels, 203, 1027)
    bias, prepared = torch.randn(203, generator=generator(1)), row.prepare(weight)
    for tokens, (system, scale) in itertools.product((1, 2, 3, 7, 13), (("unsigned", None), ("bipolar", 0.25))):
        quantization, x = Quantization(scale, bits=8 if scale is None else 3, levels=system), real(tokens, 1027)
        want = bits_matmul_reference(x, weight, bias, quantization)
        with threads(3 if tokens == 7 else 1):
            for epilogue, expected in ((Epilogue(), want), (Epilogue("relu"), want.relu())):
                y = row.run(x, prepared, bias, Problem(203, epilogue, quantization))
                assert torch.equal(y, expected), (tokens, system)
    quantization = Quantization(0.25, bits=4, y_dtype=torch.uint8, y_scale=0.5, y_zero=100)
    x = real(4, 1027).clone()
    x[1, 1026] = float("nan")
    y = row.run(x, prepared, bias, Problem(203, quantization=quantization))
    assert (y[1] == 0).all() and torch.equal(y, bits_matmul_reference(x, weight, bias, quantization))
    damaged = prepared.tensor.clone()
    damaged[-1600:] = 255  # indices and codes that no packing writes
    assert (
        row.run(x[:1], type(prepared)(row, damaged), None, Problem(203, quantization=Quantization(bits=8)))
        .isfinite()
        .all()
    )
    dense = weight_of(levels, 203, 1027)
    assert dense.pattern == "dense" and "2:4 weights, not dense" in str(row.refuses_weight(dense, Quantization()))
    with pytest.raises(KernelError, match="more than two values that are not zero"):
        row.prepare(dense)
    with pytest.raises(KernelError, match="as many bytes as its header says"):
        row.run(x, type(prepared)(row, prepared.tensor[:-64].clone()), None, Problem(203, quantization=quantization))


@each_row(KEPT)
def test_sums_of_2x4_are_whole_over_the_longest_rows(row: BitsMatmul) -> None:
    """Half bytes are summed 16 times too large, in parts of so many inputs that 32 bits hold that."""
    columns = 300_001
    codes = torch.zeros(1, columns, dtype=torch.uint8)
    levels = twos(4) if row.layout == "bits_2x4_packed" else TERNARY
    codes += -levels.beta
    codes[:, 1::2] = 0  # the least level
    weight, quantization = BitWeight(codes, levels, torch.ones(1)), Quantization(1.0, bits=8)
    x = torch.full((3, columns), 255, dtype=torch.uint8)
    y = row.run(x, row.prepare(weight), None, Problem(1, quantization=quantization))
    assert torch.equal(y, whole_product(x, weight, quantization)[0].float())


@pytest.mark.parametrize(("levels", "pattern"), [(bipolar(2), "dense"), (unsigned(8), "dense"), (unsigned(2), "2:4")])
def test_a_pattern_is_of_values_that_bytes_hold(levels: Levels, pattern: str) -> None:
    assert BitWeight(torch.zeros(3, 9, dtype=torch.uint8), levels, torch.ones(3)).pattern == pattern
    codes = torch.zeros(70, 8, dtype=torch.uint8)
    codes[69, 4:7] = 1  # behind the outputs that are looked at first
    assert BitWeight(codes, unsigned(2), torch.ones(70)).pattern == "dense"
    held = BitWeight(codes[:69], unsigned(2), torch.ones(69), torch.zeros(69, dtype=torch.int8))
    assert held.pattern == "dense" and BitWeight(codes[:69], unsigned(2), torch.ones(69)).pattern == "2:4"


def test_codes_of_inputs_are_as_near_as_their_levels_allow() -> None:
    x = real(5, 300)
    for bits, system in itertools.product(WIDTHS, LEVELS):
        quantization = Quantization(bits=bits, levels=system)
        codes, scale, zero = quantize_input(x, quantization)
        assert codes.max() <= quantization.most
        levels = codes.long() * quantization.factor - zero
        step = scale * quantization.factor
        beyond = scale if system == "twos" and bits == 1 else 0  # 1 bit of two's complement has no level above zero
        inside = (x - scale * levels).abs() <= step * 0.5001 + (
            x.clamp(min=0) if bits == 1 and system == "twos" else beyond
        )
        assert inside.all(), (bits, system)
        again = Quantization.of_range(float(x[0].min()), float(x[0].max()), bits, system)
        assert again.x_scale == scale[0].item() and again.zero == zero[0].item()


@in_turn(
    ("make", "part"),
    [
        (lambda: Quantization(bits=9), "1 to 8 bits"),
        (lambda: Quantization(bits=0), "1 to 8 bits"),
        (lambda: Quantization(levels="odd"), "unsigned, twos, bipolar"),
        (lambda: Quantization(1.0, 3, levels="twos"), "unsigned ones alone"),
        (lambda: Quantization(1.0, 4, bits=2), "from 0 to 3"),
        (lambda: Levels(9), "1 to 8 bits"),
        (lambda: Levels(2, 3), "steps of 1 or 2"),
        (lambda: BitWeight(torch.full((2, 2), 4, dtype=torch.uint8), unsigned(2), torch.ones(2)), "from 0 to 3"),
        (lambda: BitWeight(torch.full((2, 2), 3, dtype=torch.uint8), TERNARY, torch.ones(2)), "from 0 to 2"),
        (lambda: BitWeight(torch.ones(2, 2, dtype=torch.uint8), unsigned(2), torch.ones(3)), "scale for each row"),
        (lambda: BitWeight(torch.ones(2, 2, dtype=torch.uint8), unsigned(2), torch.zeros(2)), "2 of 2 are zero, NaN"),
    ],
)
def test_widths_and_levels_without_meaning_are_refused(make: Any, part: str) -> None:
    with pytest.raises(KernelError, match=part):
        make()


@each_row(DENSE)
def test_codes_above_their_bits_and_codes_without_a_range_are_refused(row: BitsMatmul) -> None:
    prepared = row.prepare(weight_of(twos(2), 20, 40))
    x = codes_of(4, 3, 40)
    with pytest.raises(KernelError, match="codes from 0 to 3"):
        row.run(x, prepared, None, Problem(20, quantization=Quantization(1.0, bits=2)))
    with pytest.raises(KernelError, match="static range"):
        row.run(x, prepared, None, Problem(20, quantization=Quantization(bits=4)))
    with pytest.raises(KernelError, match="made for another kernel"):
        row.run(real(3, 41), prepared, None, Problem(20, quantization=Quantization(bits=4)))
    short = prepared.tensor[:-64].clone()
    with pytest.raises(KernelError, match="as many bytes as its header says"):
        row.run(real(3, 40), type(prepared)(row, short), None, Problem(20, quantization=Quantization(bits=4)))


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
    if row.layout == GROUPS:
        weight = BitWeight(weight.codes, weight.levels, torch.rand(35, 2, generator=generator(2)) + 0.1)
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
    if row.layout == GROUPS:
        weight = BitWeight(weight.codes, weight.levels, torch.rand(11, 2, generator=generator(2)) + 0.1)
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
    weight, bias = weight_of(twos(4), 35, 64), torch.linspace(-3, 3, 35)
    weight = BitWeight(weight.codes, weight.levels, torch.rand(35, 2, generator=generator(2)) + 0.1)
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
