"""Rows of codes that skip the zeros of 2:4: the bits of those that multiply them."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.conftest import each_row, threads
from tests.kernels.bits_cases import EVERY, KEPT, generator, inputs, kept_of, real, weight_of
from twofour.errors import KernelError
from twofour.kernels.bits_matmul import (
    TERNARY,
    BitsMatmul,
    BitWeight,
    Levels,
    bipolar,
    bits_matmul_reference,
    twos,
    unsigned,
)
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import Quantization


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


@pytest.mark.parametrize(("levels", "pattern"), [(bipolar(2), "dense"), (unsigned(8), "dense"), (unsigned(2), "2:4")])
def test_a_pattern_is_of_values_that_bytes_hold(levels: Levels, pattern: str) -> None:
    assert BitWeight(torch.zeros(3, 9, dtype=torch.uint8), levels, torch.ones(3)).pattern == pattern
    codes = torch.zeros(70, 8, dtype=torch.uint8)
    codes[69, 4:7] = 1  # behind the outputs that are looked at first
    assert BitWeight(codes, unsigned(2), torch.ones(70)).pattern == "dense"
    held = BitWeight(codes[:69], unsigned(2), torch.ones(69), torch.zeros(69, dtype=torch.int8))
    assert held.pattern == "dense" and BitWeight(codes[:69], unsigned(2), torch.ones(69)).pattern == "2:4"
