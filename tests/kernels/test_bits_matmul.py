"""Products of codes of 1 to 8 bits: bit for bit those of whole numbers, for every pair of widths and every system."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.conftest import each_row, threads
from tests.kernels.bits_cases import DENSE, EVERY, PLAIN, codes_of, generator, inputs, made_for, real, weight_of
from tests.turns import in_turn
from twofour.errors import KernelError
from twofour.kernels.bits_matmul import (
    TERNARY,
    BitsMatmul,
    Levels,
    bipolar,
    bits_matmul_reference,
    bits_rows,
    from_layout,
    to_layout,
    twos,
    unsigned,
)
from twofour.kernels.bits_matmul.layout import LAYOUTS, OF_2X4
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import LEVELS, Quantization


def fitting(row: BitsMatmul) -> list[Levels]:
    return [levels for levels in EVERY if row.refuses_levels(levels, 4, Quantization()) is None]


@each_row(PLAIN)
def test_codes_give_the_whole_product_for_every_pair_of_widths_and_system(row: BitsMatmul) -> None:
    for levels in fitting(row):
        weight = weight_of(levels, 35, 71, 1.0)
        prepared, values = row.prepare(weight), weight.values().long().T
        for problem, x, whole in inputs(5, 71):
            want = whole @ values
            assert want.abs().max() < 1 << 24  # which float32 holds
            assert torch.equal(row.run(x, prepared, None, problem).long(), want), (levels, problem)


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


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in OF_2X4])
def test_a_layout_gives_back_the_weight(layout: str) -> None:
    for levels, (out, columns) in itertools.product(EVERY, ((1, 1), (33, 65), (130, 300))):
        if layout == "bits_packed" and levels.bits > 4:
            continue
        weight = weight_of(levels, out, columns)
        again = from_layout(to_layout(weight, layout))
        assert again.levels == levels and torch.equal(again.codes, weight.codes)
        assert torch.equal(again.scales, weight.scales)


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
