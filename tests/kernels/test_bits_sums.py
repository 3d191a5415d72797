"""Sums of products of codes: whole over the longest rows that are accepted, and longer ones are refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.conftest import each_row
from tests.kernels.bits_cases import KEPT, PLAIN, codes_of, weight_of
from twofour.errors import KernelError
from twofour.kernels.bits_matmul import (
    TERNARY,
    BitsMatmul,
    BitWeight,
    bipolar,
    twos,
    unsigned,
    whole_product,
)
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import LEVELS, Quantization


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
