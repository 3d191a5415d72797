"""Weights, codes and inputs of 1 to 8 bits, and the rows that multiply them."""

from __future__ import annotations

import itertools
from functools import cache

import torch
from torch import Tensor

from twofour.kernels.bits_matmul import (
    GROUPS,
    TERNARY,
    BitsMatmul,
    BitWeight,
    Levels,
    bipolar,
    bits_rows,
    twos,
    unsigned,
)
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import LEVELS, Quantization
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
    """A weight that a row takes: of two groups of columns each, of 2:4, or neither."""
    weight = (kept_of if row.sparse else weight_of)(levels, out, columns)
    if row.layout != GROUPS:
        return weight
    return BitWeight(weight.codes, levels, torch.rand(out, 2, generator=generator(2)) + 0.1)
