"""Sweeps of products: every weight meets a share of the numbers of tokens, those of an operation all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from tests.conftest import threads
from tests.kernels.bounds import in_fixed_point, int4_bound
from tests.kernels.sweeps.operands import (
    EPSILON,
    EXT,
    SHAPES,
    THREADS,
    Guarded,
    amid_nan,
    random,
    sparse,
)
from twofour.kernels.base import Kernel
from twofour.kernels.bits_matmul import TERNARY, BitWeight, bipolar, bits_matmul_reference, twos
from twofour.kernels.dense_matmul import whole_rows
from twofour.kernels.dense_matmul.native_dense import PanelMatmul
from twofour.kernels.nm_matmul import DYNAMIC, Quantization, nm_matmul_int8_reference
from twofour.kernels.problem import Problem
from twofour.packing import Packed, pack
from twofour.packing.encodings import INT4, dequantize
from twofour.patterns import parse

TOKENS = (0, 1, 2, 7, 8, 9, 16, 17, 33, 65, 130)
SHARE = 3
"""How many shapes share the numbers of tokens; the long sweep sets 1."""


def assert_product(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, low: bool) -> None:
    """|err| <= 4 eps K^0.5 |x||w| in norm, of bfloat16 answers 2^-8 of each besides, against float64."""
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    bound = 4 * EPSILON * x.shape[-1] ** 0.5 * x.double().norm() * weight.double().norm()
    assert y.shape == want.shape and y.isfinite().all()
    assert (y.double() - want).norm() <= bound + (1.01 * 2**-8 if low else EPSILON) * want.norm()


@cache
def inputs(columns: int, tokens: int) -> Tensor:
    return amid_nan(random(tokens, columns, seed=tokens))


def calls(
    turn: int, out: int, columns: int, low: bool = False, most: int = 130
) -> Iterator[tuple[Tensor, Tensor | None, int]]:
    """Inputs, biases and threads for the weight of a turn; `low`: inputs in bfloat16 too; `most` tokens.

    Two threads where there is work for both; the tests of each type have three.
    """
    counts = [count for place, count in enumerate(TOKENS) if count <= most and (place + turn) % SHARE == 0]
    for tokens in counts:
        x, bias = inputs(columns, tokens), random(out, seed=1) if tokens % 2 else None
        yield x, bias, 1
        if out > 64 and tokens in ((1, 17, most) if SHARE == 1 else counts[1:2] + counts[-1:]):
            yield x, bias, 2
        if low and tokens % 2:
            yield x.bfloat16(), bias, 1


def product_of_floats(row: Kernel) -> None:
    low = row.dtype == "bfloat16"
    for turn, (out, columns) in enumerate(SHAPES):
        weight = (sparse if row.sparse else random)(out, columns)
        weight = weight.bfloat16() if low else weight
        prepared = row.prepare(pack(weight, "2:4", dtype=str(weight.dtype)[6:]) if row.sparse else weight)
        for x, bias, count in calls(turn, out, columns, low):
            with threads(count):
                y = row.run(x, prepared, bias, Problem(out))
            assert y.dtype == x.dtype
            rounded = low and (x.dtype is torch.bfloat16 or not row.sparse)
            assert_product(y, x.bfloat16() if low else x, weight, bias, rounded)


@cache
def int8_weight(out: int, columns: int, is_sparse: bool) -> Packed:
    """Return a 2:4 weight, or one of blocks, all of them kept: whole numbers and scales of a dense one."""
    return pack(sparse(out, columns), "2:4", "int8") if is_sparse else pack(random(out, columns), "block:1x4@0", "int8")


@cache
def int8_product(out: int, columns: int, tokens: int, is_sparse: bool, quantization: Quantization) -> Tensor:
    packed, bias = int8_weight(out, columns, is_sparse), random(out, seed=1) if tokens % 2 else None
    return nm_matmul_int8_reference(inputs(columns, tokens), packed, bias, quantization)


def product_of_int8(row: Kernel) -> None:
    for turn, (out, columns) in enumerate(SHAPES):
        prepared, exact = row.prepare(int8_weight(out, columns, row.sparse)), row.native_product is not None
        for x, bias, count in calls(turn, out, columns):
            for quantization in (DYNAMIC, Quantization(0.02, 117)) if exact else (DYNAMIC,):
                with threads(count):
                    y = row.run(x, prepared, bias, Problem(out, quantization=quantization))
                want = int8_product(out, columns, len(x), row.sparse, quantization)
                if exact:
                    assert torch.equal(y, want)
                else:  # oneDNN scales a whole tensor, not each token
                    assert (y - want).norm() <= 0.02 * (want.norm() + x.norm()) + 1e-6


def product_of_int4(row: Kernel) -> None:
    for number, (out, columns, group) in enumerate([(1, 32, 32), (17, 64, 64), (33, 160, 32), (130, 256, 128)]):
        if row.sparse:
            held = pack(sparse(out, columns), "2:4", "int4", group=group, symmetric=number % 2 == 0)
            weight = held.unpack()
        else:
            columns -= number  # dense weights of any width: with their groups as the row makes them
            held = random(out, columns)
            group = 64 if columns % 64 == 0 else 32
            padded = torch.nn.functional.pad(held, (0, -columns % group))
            weight = dequantize(*INT4.quantize(padded, group))[:, :columns]
        prepared = row.prepare(held)
        for x, bias, count in calls(number, out, columns, True, 65):
            with threads(count):
                y = row.run(x, prepared, bias, Problem(out))
            want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            assert y.shape == want.shape and y.isfinite().all()
            if len(x):
                bound = int4_bound(x, weight, not row.sparse or in_fixed_point(row))
                bound = bound + want.abs() / (256 if x.dtype is torch.bfloat16 else 1e6) + 1e-7
                assert ((y.double() - want).abs() <= bound).all()


def product(row: Kernel) -> None:
    sweeps = {"int8": product_of_int8, "int4": product_of_int4}
    known = ("float32", "bfloat16", "any", *sweeps)
    assert row.dtype in known, f"products in {row.dtype} have no sweep"
    sweeps.get(row.dtype, product_of_floats)(row)
    if isinstance(row, PanelMatmul):
        look_ups(row)


def look_ups(row: PanelMatmul) -> None:
    """Rows of a weight, all of them, some twice and none, of its own numbers."""
    for out, columns in SHAPES:
        weight = random(out, columns)
        prepared = row.prepare(weight)
        want = whole_rows(weight)[0] if row.dtype == "int8" else weight.to(row.value)
        assert torch.equal(row.values(prepared), want)
        for places, count in itertools.product((torch.arange(out), torch.tensor([out - 1, 0, out - 1])), THREADS):
            found = Guarded((len(places), columns), row.value)
            assert EXT.dense_rows(row.index, prepared.tensor, places, found.view, count)
            assert torch.equal(found.checked(), want[places])
        assert row.rows(prepared, torch.empty(2, 0, dtype=torch.int32), columns).shape == (2, 0, columns)


BLOCKS = ("16x16@0.7", "8x1@0.8", "4x4@0.8", "1x16@0.5", "16x32@0.5", "2x8@0.8", "12x6@0.6", "5x3@0.7", "7x1@0.6/3")
"""Strips of 16, 8, 4, 2 and 1 rows, runs of 16 dwords, of 4, 1 and inputs apart."""


@cache
def of_blocks(out: int, columns: int, text: str, dtype: str) -> Packed:
    rule = parse(f"block:{text}")
    weight = random(out, columns)
    return pack(weight * rule.project(weight, absolute=True), rule, dtype)


def block_product(row: Kernel) -> None:
    low = row.dtype == "bfloat16"
    shapes = ((48, 128), (39, 77), (3, 5))
    for (number, text), (place, (out, columns)) in itertools.product(enumerate(BLOCKS), enumerate(shapes)):
        packed = of_blocks(out, columns, text, row.dtype)
        prepared = row.prepare(packed)
        # Every shape meets every number of tokens, with one size of blocks or another, and every size those up to 7.
        most = 65 if (number + place) % 3 == 0 else 7
        for x, bias, count in calls(number // 3 + place, out, columns, low, most):
            with threads(2 if len(x) == 33 else count):
                y = row.run(x, prepared, bias, Problem(out))
            if row.dtype == "int8":
                assert torch.equal(y, nm_matmul_int8_reference(x, packed, bias))
            else:
                rounded = x.bfloat16() if low else x
                assert_product(y, rounded, packed.unpack(), bias, low and x.dtype is torch.bfloat16)


def hybrid_product(row: Kernel) -> None:
    """Inputs that are whole vectors of some types, of all and of none; no dense groups, some and all."""
    low, whole = row.dtype == "bfloat16", Quantization(0.02, 117)
    cases = (("2:4+25%", 48, 128), ("2:4+25%", 33, 144), ("2:4+1%", 39, 76), ("2:4+50%", 39, 76), ("2:4+99%", 48, 128))
    for turn, (text, out, columns) in enumerate((*cases, ("2:4+1%", 3, 4), ("2:4+99%", 3, 4))):
        rule, weight = parse(text), random(out, columns)
        packed = pack(weight * rule.project(weight, absolute=True), rule, row.dtype)
        prepared = row.prepare(packed)
        for x, bias, count in calls(turn, out, columns, low or row.dtype == "int8", 65):
            with threads(2 if len(x) == 33 else count):
                y = row.run(x, prepared, bias, Problem(out))
            if row.dtype == "int8":
                assert torch.equal(y, nm_matmul_int8_reference(x, packed, bias))
            else:
                assert_product(y, x.bfloat16() if low else x, packed.unpack(), bias, low and x.dtype is torch.bfloat16)
        for tokens in (5, 8) if row.dtype == "int8" else ():
            x = torch.randint(0, 256, (tokens, columns), dtype=torch.uint8)
            y = row.run(x, prepared, None, Problem(out, quantization=whole))
            assert torch.equal(y, nm_matmul_int8_reference(x, packed, None, whole))
        found = prepared.restore()
        assert torch.equal(found.values, packed.values) and torch.equal(found.indices, packed.indices)


def bits_product(row: Kernel) -> None:
    """Widths of one, two and more bits, inputs real and rounded by a range for each token."""
    for levels, bits in ((bipolar(1), 1), (TERNARY, 8), (twos(4), 4), (twos(8), 3)):
        if (row.layout.endswith("packed") and levels.bits > 4) or (row.sparse and not levels.fits_bytes):
            continue
        for turn, (out, columns) in enumerate(((1, 4), (193, 8), (33, 260), (72, 111)), bits):
            codes = torch.randint(0, 3 if levels == TERNARY else levels.most + 1, (out, columns), dtype=torch.uint8)
            if row.sparse:
                codes = torch.where(torch.arange(columns) % 4 < 2, codes, -levels.beta).to(torch.uint8)
            weight = BitWeight(codes, levels, random(out, seed=2).abs())
            prepared, quantization = row.prepare(weight), Quantization(bits=bits)
            for x, bias, count in calls(turn, out, columns, True, 65):
                with threads(count):
                    y = row.run(x, prepared, bias, Problem(out, quantization=quantization))
                assert torch.equal(y, bits_matmul_reference(x, weight, bias, quantization))
