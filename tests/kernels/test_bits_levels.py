"""What codes of 1 to 8 bits stand for, and how near inputs come to the levels of each system."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.kernels.bits_cases import SYSTEMS, WIDTHS, inputs, real
from tests.turns import in_turn
from twofour.errors import KernelError
from twofour.kernels.bits_matmul import (
    TERNARY,
    BitWeight,
    Levels,
    unsigned,
)
from twofour.kernels.quantization import LEVELS, Quantization, quantize_input

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
