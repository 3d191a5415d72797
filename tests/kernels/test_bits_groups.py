"""Products of codes with scales of groups, zero points and inputs that stay real: exact sums, near ones of floats."""

import itertools

import pytest
import torch

from tests.conftest import each_row, threads
from tests.kernels.bits_cases import real
from twofour.errors import KernelError
from twofour.kernels.bits_matmul import (
    GROUPS,
    TERNARY,
    BitsMatmul,
    BitWeight,
    Levels,
    bipolar,
    bits_matmul_reference,
    bits_rows,
    from_layout,
    twos,
)
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import LEVELS, REAL, Quantization

ROWS = [row for row in bits_rows() if row.layout == GROUPS]
SIZES = [(70, 192, 32), (5, 71, 0), (130, 128, 64)]
FLOATS = Quantization(levels=REAL)


def weight_of(levels: Levels, size: tuple[int, int, int], shifted: bool = False) -> BitWeight:
    out, columns, group = size
    of_groups, most = (out, columns // group) if group else (out,), 3 if levels == TERNARY else levels.most + 1
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(0, most, (out, columns), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(levels.beta, levels.beta + most, of_groups, generator=generator)
    scales = torch.rand(of_groups, generator=generator) + 0.1
    return BitWeight(codes, levels, scales, zeros.to(torch.int8) if shifted else None)


KINDS = [(bipolar(1), False), (TERNARY, False), (twos(2), True), (twos(3), False), (twos(4), True), (bipolar(3), False)]
KINDS += [(twos(8), False), (twos(7), True)]


@each_row(ROWS)
def test_rounded_inputs_give_the_reference_to_the_bit(row: BitsMatmul) -> None:
    for (levels, shifted), size in itertools.product(KINDS, SIZES):
        weight, (out, columns, group) = weight_of(levels, size, shifted), size
        prepared, bias = row.prepare(weight), torch.randn(out)
        again = row.restore(prepared)
        assert torch.equal(again.codes, weight.codes) and torch.equal(again.scales, weight.scales)
        assert again.group == group and torch.equal(again.values(), weight.values())
        for bits, system, tokens, dtype in zip(
            (8, 4, 3), LEVELS, (1, 9, 6), (torch.float32, torch.bfloat16, torch.float32), strict=True
        ):
            for scale in (None, 0.25):
                quantization, x = Quantization(scale, bits=bits, levels=system), real(tokens, columns, dtype)
                assert row.refuses_levels(levels, columns, quantization, group=group, shifted=shifted) is None or (
                    not group and not shifted
                )
                y = row.run(x, prepared, bias, Problem(out, quantization=quantization))
                assert torch.equal(y, bits_matmul_reference(x, weight, bias, quantization)), (
                    levels,
                    size,
                    quantization,
                )


EVERY = [TERNARY, *(make(bits) for bits in range(1, 9) for make in (bipolar, twos) if (make, bits) != (twos, 1))]


@each_row(ROWS)
def test_every_pair_of_widths_gives_the_reference_to_the_bit(row: BitsMatmul) -> None:
    for number, (levels, bits) in enumerate(itertools.product(EVERY, range(1, 9))):
        quantization = Quantization(bits=bits, levels=LEVELS[number % len(LEVELS)])
        assert row.refuses_levels(levels, 96, quantization, group=32, shifted=False) is None
        weight, x = weight_of(levels, (33, 96, 32)), real(3, 96)
        y = row.run(x, row.prepare(weight), None, Problem(33, quantization=quantization))
        assert torch.equal(y, bits_matmul_reference(x, weight, None, quantization)), (levels, quantization)


@each_row(ROWS)
def test_sums_of_inputs_at_and_beyond_16_bits_give_the_reference_to_the_bit(row: BitsMatmul) -> None:
    low = torch.full((5, 1024), -1e3)  # code 0 throughout: -128 as a byte with a sign, -32768 in a group of 256
    for (levels, shifted), group, (system, scale) in itertools.product(
        [(twos(4), True), (twos(2), True), (twos(4), False), (bipolar(3), True)],
        (128, 256, 512),  # odd levels have steps of two: 128 is where their sums end
        [("unsigned", 0.25), ("bipolar", None), ("twos", None)],
    ):
        weight = weight_of(levels, (70, 1024, group), shifted)
        quantization, prepared = Quantization(scale, bits=8, levels=system), row.prepare(weight)
        for x in (low[:1], low, real(3, 1024)):
            y = row.run(x, prepared, None, Problem(70, quantization=quantization))
            assert torch.equal(y, bits_matmul_reference(x, weight, None, quantization)), (levels, group, system)


@each_row(ROWS)
def test_many_tokens_whose_panels_are_taken_apart_once_give_the_same_bits(row: BitsMatmul) -> None:
    tokens = 131  # more than kManyTokens of groups.h, and a rest of each tile
    for ((levels, shifted), size), (bits, system, scale) in zip(
        itertools.product(KINDS, SIZES),
        itertools.cycle([(8, "unsigned", None), (7, "unsigned", 0.25), (5, "twos", None), (8, "unsigned", 0.25)]),
        strict=False,
    ):
        weight, (out, columns, _) = weight_of(levels, size, shifted), size
        quantization, x, bias = (
            Quantization(scale, bits=bits, levels=system),
            real(tokens, columns).clone(),
            torch.randn(out),
        )
        x[77, 3] = float("nan")
        with threads(1 + 2 * (bits == 5)):
            y = row.run(x, row.prepare(weight), bias, Problem(out, quantization=quantization))
        want = bits_matmul_reference(x, weight, bias, quantization)
        assert torch.equal(y.nan_to_num(7.0), want.nan_to_num(7.0)) and y[77].isnan().all(), (
            levels,
            size,
            quantization,
        )


@each_row(ROWS)
def test_inputs_that_stay_real_are_as_near_as_float32(row: BitsMatmul) -> None:
    for (levels, shifted), size in itertools.product(KINDS, SIZES):
        weight, (out, columns, _) = weight_of(levels, size, shifted), size
        prepared = row.prepare(weight)
        for tokens, dtype in ((1, torch.float32), (7, torch.bfloat16)):
            x = real(tokens, columns, dtype)
            y = row.run(x, prepared, None, Problem(out, quantization=FLOATS))
            exact, magnitude = x.double() @ weight.real().double().T, x.double().abs() @ weight.real().double().abs().T
            # 2^-23 of the greatest input for each, and the rounding of float32 sums
            bound = x.double().abs().amax(1, keepdim=True) * weight.real().double().abs().sum(1) * 2**-23
            bound = bound + magnitude * 2**-21
            answer = 2**-8 * exact.abs() if dtype is torch.bfloat16 else 0
            assert y.dtype == dtype and ((y.double() - exact).abs() <= bound + answer).all(), (levels, size)


@each_row(ROWS)
def test_nan_threads_epilogues_and_codes(row: BitsMatmul) -> None:
    weight = weight_of(twos(4), (203, 256, 128), True)
    prepared, bias, other = row.prepare(weight), torch.randn(203), torch.randn(37, 203)
    x = real(37, 512)[:, ::2].clone()
    x[3, 100], x[20, 0] = torch.nan, torch.inf
    for quantization in (Quantization(), FLOATS):
        y = row.run(x, prepared, bias, Problem(203, quantization=quantization))
        with threads(3):
            epilogue = Problem(203, Epilogue("relu", "add"), quantization)
            assert torch.equal(
                (y.relu() + other).nan_to_num(9.0), row.run(x, prepared, bias, epilogue, other).nan_to_num(9.0)
            )
        lost = y.isnan().all(1)
        assert lost[[3, 20]].all() and lost.sum() == 2 and y[~lost].isfinite().all()
        assert torch.equal(bits_matmul_reference(x, weight, bias, quantization).isnan(), y.isnan())
    codes = torch.randint(0, 16, (5, 256), dtype=torch.uint8)
    static = Quantization(0.5, 7, bits=4, y_dtype=torch.uint8, y_scale=3.0, y_zero=100)
    y = row.run(codes, prepared, bias, Problem(203, quantization=static))
    assert torch.equal(y, bits_matmul_reference(codes, weight, bias, static))


def test_what_no_row_takes_is_refused_with_its_reason() -> None:
    row, plain = next(row for row in ROWS if row.isa == "scalar"), bits_rows()[0]
    asked = Quantization()
    assert "groups of 32, 64, ... to 2048" in str(row.refuses_levels(twos(4), 96, asked, group=48))
    assert "to 224 inputs" in str(row.refuses_levels(twos(8), 1024, asked, group=512))
    assert "zero points of at most 7 bits" in str(row.refuses_levels(twos(8), 64, asked, group=32, shifted=True))
    assert "at most 65536" in str(row.refuses_levels(twos(2), 70_000, FLOATS))
    assert "is for scales of groups" in str(row.refuses_levels(twos(2), 64, asked))
    assert "is for no scales of groups" in str(plain.refuses_levels(twos(2), 64, FLOATS))
    weight = weight_of(twos(2), (20, 64, 0))
    with pytest.raises(KernelError, match="codes, of a row whose weight has no groups"):
        plain.run(real(2, 64), plain.prepare(weight), None, Problem(20, quantization=FLOATS))
    with pytest.raises(KernelError, match="codes, of a row"):
        row.run(torch.zeros(2, 64, dtype=torch.uint8), row.prepare(weight), None, Problem(20, quantization=FLOATS))
    for broken in ({"levels": REAL, "bits": 4}, {"levels": REAL, "x_scale": 1.0}, {"levels": REAL, "x_zero": 1}):
        with pytest.raises(KernelError, match="the codes of an input are impossible"):
            Quantization(**broken)


@each_row(ROWS)
def test_groups_whose_numbers_the_layout_cannot_hold_are_refused_when_prepared(row: BitsMatmul) -> None:
    low = BitWeight(torch.zeros(4, 1024, dtype=torch.uint8), twos(8), torch.ones(4, 2))
    with pytest.raises(KernelError, match=r"sums of the values of groups from -65536 to -65536(.|\n)*smaller groups"):
        row.prepare(low)
    shifted = BitWeight(low.codes, twos(8), torch.ones(4, 32), torch.full((4, 32), 127, dtype=torch.int8))
    with pytest.raises(KernelError, match="levels of code 0 from -255 to -255"):
        row.prepare(shifted)
    levels, group = twos(8), 224  # the most that it takes, at its lowest level
    most = BitWeight(torch.zeros(3, 448, dtype=torch.uint8), levels, torch.ones(3, 2))
    assert row.refuses_levels(levels, 448, Quantization(), group=group) is None
    x = real(2, 448)
    assert torch.equal(row.run(x, row.prepare(most), None, Problem(3)), bits_matmul_reference(x, most))


@each_row(ROWS)
def test_a_header_that_says_other_groups_is_refused(row: BitsMatmul) -> None:
    prepared, problem = row.prepare(weight_of(twos(2), (20, 128, 32))), Problem(20, quantization=Quantization(bits=4))
    for group in (64, 33, 31, 96, 0x8000 | 32):
        tensor = prepared.tensor.clone()
        tensor[6:8] = torch.tensor([group & 255, group >> 8], dtype=torch.uint8)
        with pytest.raises(KernelError, match="as many bytes as its header says"):
            row.run(real(2, 128), type(prepared)(row, tensor), None, problem)
    assert from_layout(prepared.tensor).group == 32


@pytest.mark.parametrize("zero", [-9, 8, 127])
def test_a_zero_point_is_a_level(zero: int) -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    zeros = torch.full((4, 2), zero, dtype=torch.int8)
    with pytest.raises(KernelError, match="zero point of a weight of codes is no level"):
        BitWeight(codes, twos(4), scales, zeros)
