"""Every row of every table that runs on a CPU, against its family's reference: shapes, tails, poison, threads.

A row is swept by the driver of its operation; one of an operation without a driver fails, so that no row is untested.
Inputs stand in memory full of NaN and outputs between guards, where the operation takes such operands. Every weight
meets a third of the numbers of tokens and the next weight the next third, so that those of an operation meet all of
them together, and blocks in each of their shapes; `make test-long` has every weight meet all of them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import threads
from tests.kernels.bounds import in_fixed_point, int4_bound
from tests.kernels.test_nm_conv import APART, GEOMETRIES, assert_convolution, assert_whole
from tests.kernels.test_nm_conv import sparse as sparse_conv
from twofour import native
from twofour.kernels.attention import reference as attention_reference
from twofour.kernels.attention import whole_reference as whole_attention
from twofour.kernels.base import Kernel
from twofour.kernels.bits_matmul import TERNARY, BitWeight, bipolar, bits_matmul_reference, twos
from twofour.kernels.bits_matmul.conv import BitsConvProblem, bits_conv_reference, bits_conv_rows
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry
from twofour.kernels.epilogue import ACTIVATIONS
from twofour.kernels.fused_block import Expression, program
from twofour.kernels.nm_compress import nm_compress_reference
from twofour.kernels.nm_conv_gradient import nm_conv_gradient_reference
from twofour.kernels.nm_gradient import MODES, nm_gradient_reference
from twofour.kernels.nm_matmul import DYNAMIC, Quantization, from_layout, nm_matmul_int8_reference
from twofour.kernels.nm_matmul.layout import to_layout
from twofour.kernels.nm_sddmm import nm_sddmm_reference
from twofour.kernels.nm_unbiased import nm_unbiased_reference
from twofour.kernels.norm import reference as norm_reference
from twofour.kernels.problem import Problem
from twofour.kernels.recurrent import CELLS, recurrent_reference
from twofour.kernels.rotation import reference as rotation_reference
from twofour.kernels.squeeze_excite import reference as squeeze_excite_reference
from twofour.kernels.table import convolutions, find, listing, rows
from twofour.native import NativeRow
from twofour.packing import HEADER_BYTES, Packed, kept, layout_header, pack
from twofour.packing.encodings import INT4, dequantize
from twofour.patterns import parse
from twofour.patterns.nonzero import ties_reference
from twofour.patterns.transposable import project_tiles_reference
from twofour.structure.permutation import reference as stripes_reference
from twofour.structure.permutation.stripes import _columns

EPSILON = torch.finfo(torch.float32).eps
THREADS = (1, 2)
HALVES = (torch.float32, torch.bfloat16)
SHAPES = [(1, 4), (5, 12), (193, 8), (16, 64), (17, 68), (33, 260), (96, 32), (72, 112), (385, 132), (400, 4)]
TOKENS = (0, 1, 2, 7, 8, 9, 16, 17, 33, 65, 130)
SHARE = 3
"""How many shapes share the numbers of tokens; `test_every_row_is_right_with_every_number_of_tokens` sets 1."""
WIDTHS = {"8 bits": torch.int8, "16 bits": torch.float16, "32 bits": torch.float32, "64 bits": torch.float64}
PATTERNS = [(2, 4), (1, 2), (1, 4), (2, 5), (4, 8), (8, 16), (3, 64)]
EXT = native.extension()


@cache
def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@cache
def sparse(out: int, columns: int, seed: int = 0) -> Tensor:
    weight = random(out, columns, seed=seed)
    return weight * parse("2:4").project(weight, absolute=True)


def amid_nan(values: Tensor) -> Tensor:
    """Return equal rows, each with NaN before and behind it."""
    wide = torch.full((*values.shape[:-1], values.shape[-1] + 24), float("nan")).to(values.dtype)
    wide[..., 8:-16] = values
    return wide[..., 8:-16]


class Guarded:
    """An output between bytes that must stay as they are."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = int(np.prod(shape)) * dtype.itemsize
        self._bytes = torch.full((size + 256,), 0xFF, dtype=torch.uint8)
        start = 64 + -self._bytes.data_ptr() % 64
        self._inside = slice(start, start + size)
        self.view = self._bytes[self._inside].view(dtype).view(shape)

    def checked(self) -> Tensor:
        outside = self._bytes.clone()
        outside[self._inside] = 0xFF
        assert (outside == 0xFF).all(), "written outside of the answer"
        return self.view


def first_largest(scores: Tensor, n: int, m: int, absolute: bool) -> Tensor:
    """Keep the n largest of every m, the lowest index of equals, in float64."""
    ranked = scores.double().view(-1, m)
    order = (ranked.abs() if absolute else ranked).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros(ranked.shape, dtype=torch.bool).scatter_(1, order[:, :n], True).view(scores.shape)


def with_ties(count: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, (count,), generator=torch.Generator().manual_seed(seed)).float()


def nm_mask(row: NativeRow, count: int) -> None:
    for (n, m), groups in itertools.product(PATTERNS if row.pattern == "any" else [(2, 4)], (1, 3, 17, 64, 4133)):
        for scores, absolute in ((random(groups * m, seed=m), False), (with_ties(groups * m, groups), True)):
            keep = Guarded((groups * m,), torch.bool)
            assert EXT.nm_mask(row.index, scores, keep.view, n, m, absolute, count)
            assert torch.equal(keep.checked(), first_largest(scores, n, m, absolute))
            bad = scores.clone()
            bad[-1] = float("nan")
            assert not EXT.nm_mask(row.index, bad, keep.view, n, m, absolute, count)


def nm_tiles(row: NativeRow, count: int) -> None:
    for shape in ((4, 4), (4, 36), (8, 60), (300, 68)):
        for scores, absolute in ((random(*shape), False), (with_ties(shape[0] * shape[1], 1).view(shape), True)):
            keep = Guarded(shape, torch.bool)
            assert EXT.nm_tiles(row.index, scores, keep.view, absolute, count)
            assert torch.equal(keep.checked(), project_tiles_reference(scores, absolute=absolute))


def nm_nonzero(row: NativeRow, count: int) -> None:
    dtype = WIDTHS[row.dtype]
    magnitude, finite = (-1, 127) if dtype is torch.int8 else masks_of(dtype)
    for size in (1, 7, 8, 63, 64, 65, 1000, 200001):
        values = with_ties(size, size).to(dtype)
        if values.is_floating_point():
            values[::5] = -0.0
            values[-1] = float("nan")
        bits = Guarded(((size + 7) // 8,), torch.uint8)
        found = EXT.nm_nonzero(row.index, values, bits.view, 0, magnitude, finite, count)
        nonzero = values.numpy() != 0
        assert np.array_equal(bits.checked().numpy(), np.packbits(nonzero, bitorder="little"))
        negative = int(((values == 0) & values.signbit()).sum()) if values.is_floating_point() else 0
        assert found == (int(nonzero.sum()), negative, int((~values.isfinite()).sum()))


def masks_of(dtype: torch.dtype) -> tuple[int, int]:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.iinfo(whole).max, int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(whole))


def nm_ties(row: NativeRow, count: int) -> None:
    sign = 1 if WIDTHS[row.dtype] is torch.int8 else 0
    for (n, m), groups in itertools.product(PATTERNS if row.pattern == "any" else [(2, 4)], (1, 9, 130)):
        for inner in (1, 5, 16, 67):
            values = with_ties(3 * groups * m * inner, groups).to(WIDTHS[row.dtype])
            view = values.view(3, groups * m, inner).transpose(1, 2)
            found = EXT.nm_ties(row.index, values, sign, 3, groups * m, inner, n, m)
            assert found == ties_reference(view, n, m)


@cache
def refined(height: int, n: int, m: int, window: int) -> tuple[Tensor, list[list[int]]]:
    """Whole numbers, whose sums are exact, and the stripes that the reference makes of them."""
    scores = torch.randint(0, 50, (height, 4 * m), generator=torch.Generator().manual_seed(7)).float()
    order = stripes_reference.refine(scores.numpy(), np.arange(4 * m), n, m, window, 2, seed=5)
    return scores, sorted(map(sorted, order.reshape(-1, m).tolist()))


def nm_stripes(row: NativeRow, count: int) -> None:
    for (n, m, window), height in itertools.product([(2, 4, 8), (1, 2, 4), (3, 5, 10)], (1, 19, 300)):
        scores, want = refined(height, n, m, window)
        held, order = _columns(scores), torch.arange(4 * m)
        EXT.nm_stripes_refine(row.index, held, order, n, m, 5, count, window, 2, lambda done, of: None)
        assert sorted(map(sorted, order.view(-1, m).tolist())) == want
        dealt, first = torch.arange(4 * m), torch.arange(4 * m)
        EXT.nm_stripes_assign(row.index, held, dealt, n, m, 5, count, 4, 5, 2)
        EXT.nm_stripes_assign(native.rows("nm_stripes")[0].index, held, first, n, m, 5, 1, 4, 5, 2)
        assert torch.equal(dealt, first) and dealt.sort().values.tolist() == list(range(4 * m))
        before, after = (stripes_reference.kept(scores.numpy()[:, o], n, m) for o in (np.arange(4 * m), dealt.numpy()))
        assert after >= before


def nm_compress(row: NativeRow, count: int) -> None:
    for shape, make in itertools.product(SHAPES, (random, lambda *size: with_ties(size[0] * size[1], 0).view(size))):
        weight = amid_nan(make(*shape))
        values = Guarded((shape[0], shape[1] // 2), torch.float32)
        indices = Guarded((shape[0], (shape[1] + 7) // 8), torch.uint8)
        dropped = EXT.nm_compress(row.index, weight, values.view, indices.view, count)
        want = nm_compress_reference(weight)
        assert dropped == want[0]
        assert torch.equal(values.checked(), want[1]) and torch.equal(indices.checked(), want[2])


@cache
def gradients(*shape: int) -> tuple[Tensor, Tensor]:
    """Groups with three, one and no value, and ties, in both types."""
    found = random(*shape) ** 3
    chance = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    found[chance < 0.3] = 0
    found[chance > 0.7] = found[chance > 0.7].sign()
    return found, found.bfloat16()


unbiased_of = cache(nm_unbiased_reference)
pruned_of = cache(nm_gradient_reference)


def panels(rows: int, columns: int, dtype: torch.dtype) -> Guarded:
    name, layout = ("bfloat16", "bf16_panels") if dtype is torch.bfloat16 else ("float32", "panels")
    out = Guarded((HEADER_BYTES + EXT.layout_bytes(layout, rows, columns, 0, False),), torch.uint8)
    head = layout_header("2:4", name, layout, rows, columns)
    out.view[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return out


def nm_unbiased(row: NativeRow, count: int) -> None:
    for tokens, columns in ((4, 1), (64, 16), (68, 37), (200, 401)):
        for given, dtype in itertools.product(gradients(tokens, columns), (torch.float32, torch.bfloat16)):
            out = panels(columns, tokens, dtype)
            EXT.nm_unbiased(row.index, amid_nan(given), 2**32 - 1, out.view, count)
            assert torch.equal(from_layout(out.checked()).unpack(), unbiased_of(given, 2**32 - 1).T.to(dtype))


def nm_gradient(row: NativeRow, count: int) -> None:
    for shape in ((1, 1, 4), (2, 7, 64), (1, 400, 68), (3, 130, 516)):
        for given, mode in itertools.product(gradients(*shape), range(len(MODES))):
            want = pruned_of(given, MODES[mode], eps=1e-9, seed=2**32 - 1)
            dense = Guarded(shape, given.dtype)
            packed = panels(shape[0] * shape[1], shape[2], given.dtype)
            for out in (dense, packed):
                EXT.nm_gradient(row.index, amid_nan(given), mode, 1e-9, 2**32 - 1, out.view, out is packed, count)
            for found in (dense.checked(), from_layout(packed.checked()).unpack().view(shape)):
                assert torch.equal(found != 0, want != 0)
                rtol = 2**-7 if given.dtype is torch.bfloat16 else 1e-5
                rtol = rtol if MODES[mode] == "rescaled" else 0
                torch.testing.assert_close(found, want, rtol=rtol, atol=0)


def nm_conv_gradient(row: NativeRow, count: int) -> None:
    """Among them one pixel, windows past the image and pixels under no window."""
    cases = (
        ((1, 4, 1, 1, 1), (1, 1), (1, 1), (0, 0), (1, 1)),
        ((2, 68, 7, 5, 37), (3, 3), (1, 1), (1, 1), (1, 1)),
        ((1, 64, 9, 4, 128), (3, 2), (2, 3), (4, 0), (2, 1)),
        ((13, 12, 8, 8, 150), (5, 1), (3, 2), (7, 1), (1, 2)),
    )
    for (images, out, high, wide, inputs), *axes in cases:
        geometry = Geometry(inputs, out, *axes[:2], axes[2], axes[2], axes[3])
        size = geometry.output(high, wide)
        dense = nm_gradient_reference(random(images, size[0] * size[1], out), "magnitude")
        packed = to_layout(pack(dense.flatten(0, 1), "2:4"), "panels")
        gradient = dense.view(images, *size, out).movedim(-1, 1)
        weight = random(out, inputs, *axes[0], seed=1)
        for given in (weight, weight.contiguous(memory_format=torch.channels_last)):
            dx = Guarded((images, high, wide, inputs), torch.float32)
            sides = zip(*axes, strict=True)
            answer = dx.view.movedim(-1, 1)
            assert EXT.nm_conv_gradient(row.index, packed, amid_nan(given), answer, *sides, size, count)
            want = nm_conv_gradient_reference(gradient.double(), weight.double(), geometry, (high, wide))
            bound = nm_conv_gradient_reference(gradient.double().abs(), weight.double().abs(), geometry, (high, wide))
            error = (dx.checked().movedim(-1, 1) - want).abs()
            assert (error <= bound * (out * EPSILON)).all()


def nm_sddmm(row: NativeRow, count: int) -> None:
    for tokens, out, columns in ((1, 1, 4), (7, 5, 12), (33, 16, 64), (130, 33, 68), (600, 280, 20)):
        places = kept.places_of(parse("2:4").project(random(out, columns, seed=2), absolute=True))
        for dtype in (torch.float32, torch.bfloat16)[row.dtype == "bfloat16" :]:
            left, right = random(tokens, out).to(dtype), random(tokens, columns, seed=1).to(dtype)
            values = Guarded((out, columns // 2), torch.float32)
            EXT.nm_sddmm(row.index, amid_nan(left), amid_nan(right), places.indices, values.view, count)
            want = nm_sddmm_reference(left.double(), right.double(), places)
            bound = nm_sddmm_reference(left.abs(), right.abs(), places) * (tokens * EPSILON)
            assert ((values.checked() - want).abs() <= bound).all()


def norm(row: NativeRow, count: int) -> None:
    dtype = getattr(torch, row.dtype)
    for height, width in itertools.product((1, 5, 700), (1, 7, 8, 17, 37, 64, 150)):
        x, weight, bias = (random(height, width) + 3).to(dtype), random(width, seed=1), random(width, seed=2)
        for centred, answers in itertools.product((True, False), (torch.float32, torch.bfloat16)):
            y = Guarded((height, width), answers)
            EXT.norm(row.index, amid_nan(x), weight, bias, y.view, 1e-3, centred, count)
            want = norm_reference(x.double(), weight.double(), bias.double(), 1e-3, centred)
            rounding = 2**-8 if answers is torch.bfloat16 else 0
            error = (y.checked().double() - want).abs()
            assert (error <= rounding * (1 + 1e-4) * want.abs() + 1e-5 * (1 + want.abs())).all()


def fused_block(row: NativeRow, count: int) -> None:
    """A softmax beside a sum over each row, of operands that are broadcast."""
    expression = Expression()
    x, shift = expression.load(), expression.load()
    value = expression.apply("add", x, shift)
    power = expression.apply("exp", expression.apply("sub", value, expression.apply("amax", value)))
    whole = expression.apply("sum", power)
    expression.store(expression.apply("div", power, whole))
    expression.store(whole)
    block = program(expression)
    for height, width in itertools.product((1, 5, 70), (1, 7, 8, 33, 1025, 2500)):
        x, shift = random(height, width), random(width, seed=1)
        y, sums = Guarded((height, width), torch.float32), Guarded((height, 1), torch.float32)
        block.run(row.index, [amid_nan(x), amid_nan(shift)], [y.view, sums.view], count)
        value = x.double() + shift.double()
        torch.testing.assert_close(y.checked().double(), value.softmax(-1), rtol=1e-5, atol=1e-7)
        want = (value - value.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
        torch.testing.assert_close(sums.checked().double(), want, rtol=1e-5, atol=1e-7)


def squeeze_excite(row: NativeRow, count: int) -> None:
    sizes = ((1, 1, 1, 1, 1), (2, 7, 3, 5, 3), (3, 33, 8, 9, 8), (2, 130, 17, 13, 11))
    for (images, channels, squeezed, height, width), (code, act) in itertools.product(
        sizes, ((1, "relu"), (4, "silu"))
    ):
        x = random(images, height, width, channels).permute(0, 3, 1, 2)
        reduce, expand = random(squeezed, channels), random(squeezed, channels, seed=1)
        biases = (random(squeezed, seed=2), random(channels, seed=3)) if images > 1 else (None, None)
        for number, gate in enumerate(("sigmoid", "hardsigmoid")):
            y = Guarded((images, height, width, channels), torch.float32)
            answer = y.view.permute(0, 3, 1, 2)
            EXT.squeeze_excite(row.index, x, reduce, biases[0], expand, biases[1], answer, code, number, count)
            first, second = (None if bias is None else bias.double() for bias in biases)
            want = squeeze_excite_reference(x.double(), reduce.double(), first, expand.double(), second, act, gate)
            error = (y.checked().double().permute(0, 3, 1, 2) - want).abs()
            assert (error <= 1e-5 * (1 + want.abs())).all()


def recurrent(row: NativeRow, count: int) -> None:
    product = find("dense_matmul_f32_panels__scalar")
    for code, cell in enumerate(CELLS):
        for batch, steps, inputs, hidden in ((1, 1, 1, 1), (1, 4, 5, 7), (3, 2, 12, 33), (70, 2, 4, 240)):
            gates, lstm = CELLS[cell] * hidden, cell == "lstm"
            x, state, memory = random(steps * batch, inputs), random(batch, hidden), random(batch, hidden, seed=1)
            weights = [random(gates, n, seed=n) / n**0.5 for n in (inputs, hidden)]
            biases = random(gates, seed=4), random(gates, seed=5)
            y, last, kept = (
                Guarded(shape, torch.float32) for shape in ((steps * batch, hidden), *[(1, batch, hidden)] * 2)
            )
            prepared = [product.prepare(weight).tensor for weight in weights]
            EXT.recurrent(
                *(row.index, code, product.native_product, product.native_product, -1, amid_nan(x), None),
                *(prepared[0], biases[0], prepared[1], biases[1], None, state[None], memory[None] if lstm else None),
                *(y.view, last.view, kept.view if lstm else None, 0, count),
            )
            exact = [[one.double() for one in part] for part in (weights, biases)]
            first = state.double(), memory.double() if lstm else None
            of_step, of_last, of_memory = recurrent_reference(cell, x.double(), exact[0], exact[1], *first)
            want = of_step, of_last[None], None if of_memory is None else of_memory[None]
            for got, expected in zip((y, last, kept), want, strict=True):
                if expected is not None:
                    torch.testing.assert_close(got.checked().double(), expected, rtol=2e-5, atol=2e-5)


def attention(row: NativeRow, count: int) -> None:
    low = row.dtype != "float32"
    sizes = (
        (1, 1, 1, 1, 1, 1),
        (2, 2, 5, 7, 16, 16),
        (1, 3, 40, 70, 70, 33),
        (2, 4, 1, 128, 64, 64),
        (1, 2, 65, 63, 80, 8),
    )
    for (batch, heads, queries, keys, width, value_width), kind in itertools.product(
        sizes, ("none", "add", "keep", "causal")
    ):
        q, k, v = (
            amid_nan(random(batch, heads, length, size, seed=seed).to(torch.bfloat16 if low else torch.float32))
            for seed, (length, size) in enumerate(((queries, width), (keys, width), (keys, value_width)))
        )
        mask = {"add": random(batch, 1, queries, keys), "keep": random(batch, 1, queries, keys) > -0.5}.get(kind)
        wide = None if mask is None else mask.expand(batch, heads, queries, keys)
        scale, causal = width**-0.5, kind == "causal"
        out = Guarded((batch, heads, queries, value_width), q.dtype)
        EXT.attention(row.index, q, k, v, out.view, wide, None, None, scale, causal, 0.0, 0.0, 0, count)
        if row.dtype == "int8" and queries > 3:  # fewer are left to floats
            want = whole_attention(q, k, v, mask, causal=causal).bfloat16()
            assert torch.equal(out.checked(), want)
            continue
        exact = None if mask is None else mask.double() if kind == "add" else mask
        want = attention_reference(q.double(), k.double(), v.double(), exact, causal=causal)
        size = attention_reference(q.double(), k.double(), v.double().abs(), exact, causal=causal)
        bound = 2**-8 * (want.abs() + size) * (1 + 2**-8) + 2e-4 * size + 1e-5 if low else 3e-6 * (1 + want.abs())
        assert ((out.checked().double() - want).abs() <= bound).all()


def attention_gradient(row: NativeRow, count: int) -> None:
    dtype = getattr(torch, row.dtype)
    sizes = (
        (1, 1, 1, 1, 1, 1),
        (2, 2, 5, 7, 16, 16),
        (1, 3, 50, 70, 70, 33),
        (1, 2, 97, 128, 64, 64),
        (1, 1, 9, 63, 80, 8),
    )
    for (batch, heads, queries, keys, width, value_width), kind in itertools.product(
        sizes, ("none", "add", "keep", "causal")
    ):
        shapes = (queries, width), (keys, width), (keys, value_width), (queries, value_width)
        q, k, v, upstream = (random(batch, heads, *of, seed=seed).to(dtype) for seed, of in enumerate(shapes))
        mask = {"add": random(batch, 1, queries, keys), "keep": random(batch, 1, queries, keys) > -0.5}.get(kind)
        wide = None if mask is None else mask.expand(batch, heads, queries, keys)
        answers = [Guarded(tuple(of.shape), dtype) for of in (q, k, v)]
        given = *map(amid_nan, (q, k, v, upstream)), *(answer.view for answer in answers)
        EXT.attention_gradient(row.index, *given, wide, width**-0.5, kind == "causal", 0, 0, count)
        leaves = [of.double().requires_grad_() for of in (q, k, v)]
        exact = mask.double() if mask is not None and kind == "add" else mask
        y = attention_reference(*leaves, exact, causal=kind == "causal")
        bound = 2**-7 if dtype is torch.bfloat16 else 1e-5  # P and dS may be rounded too
        for answer, want in zip(answers, torch.autograd.grad(y, leaves, upstream.double()), strict=True):
            assert ((answer.checked().double() - want).abs() <= bound * (want.abs().max() + 1e-3)).all()


def activation(row: NativeRow, count: int) -> None:
    for size, dtype in itertools.product((1, 7, 64, 20001), (torch.float32, torch.bfloat16)):
        x, upstream = (2 * random(size)).to(dtype), random(size, seed=1).to(dtype)
        for code, (name, compute) in enumerate(ACTIVATIONS.items()):
            if name == "none":
                continue
            leaf, bound = x.double().requires_grad_(), 2**-8 if dtype is torch.bfloat16 else 2e-6
            y = compute(leaf)
            (dx,) = torch.autograd.grad(y, leaf, upstream.double())
            for given, want in ((None, y), (amid_nan(upstream), dx)):
                out = Guarded((size,), dtype)
                EXT.activation(row.index, code, amid_nan(x), given, out.view, count)
                assert ((out.checked().double() - want).abs() <= bound * want.abs() + 3e-6).all()
    gates(row, count)


def gates(row: NativeRow, count: int) -> None:
    """Gates, by the rows of activations."""
    for (height, width), dtype in itertools.product(
        ((1, 1), (5, 7), (3, 64), (40, 300)), (torch.float32, torch.bfloat16)
    ):
        x, bound = (2 * random(height, 2 * width)).to(dtype), 2**-8 if dtype is torch.bfloat16 else 2e-6
        for (code, name), behind in itertools.product(list(enumerate(ACTIVATIONS))[1:], (False, True)):
            out, halves = Guarded((height, width), dtype), x.double().chunk(2, -1)
            EXT.gated_activation(row.index, code, amid_nan(x), out.view, behind, count)
            y, z = ACTIVATIONS[name](halves[behind]), halves[not behind]
            assert ((out.checked().double() - y * z).abs() <= bound * (y * z).abs() + 3e-6 * z.abs() + 1e-30).all()


def rotation(row: NativeRow, count: int) -> None:
    sizes = ((1, 1, 1, 2), (2, 3, 2, 10), (3, 5, 1, 64), (1, 40, 7, 96))
    for (batch, length, heads, width), x_type, of in itertools.product(sizes, HALVES, HALVES):
        x = random(batch, length, heads * width).to(x_type)
        cos, sin = (random(of_each, length, width, seed=seed).to(of) for seed, of_each in enumerate((batch, 1), 1))
        out = Guarded(tuple(x.shape), x_type)
        wide = sin.expand(batch, length, width)
        EXT.rotation(row.index, amid_nan(x), amid_nan(cos), wide, out.view, width, count)
        want = rotation_reference(x.double(), cos[:, None].double(), sin[:, None].double())
        bound = 2**-8 if x_type is torch.bfloat16 else 0
        assert ((out.checked().double() - want).abs() <= bound * want.abs() + 4e-6).all()


def column_sums(row: NativeRow, count: int) -> None:
    for height, width in itertools.product((0, 1, 7, 64, 200), (1, 7, 16, 300, 4100)):
        for dtype in (torch.float32, torch.bfloat16):
            given, sums = random(height, width).to(dtype), Guarded((width,), torch.float32)
            EXT.column_sums(row.index, amid_nan(given), sums.view, count)
            bound = given.double().abs().sum(0) * (height**0.5 + 4) * EPSILON
            assert ((sums.checked().double() - given.double().sum(0)).abs() <= bound).all()
    for images, channels, height, width in itertools.product((1, 3), (1, 7, 300, 1030), (1, 7), (1, 9, 20)):
        x = amid_nan(random(images * height * width * channels))
        x = x.view(images, height, width, channels).permute(0, 3, 1, 2)
        means = Guarded((images, channels), torch.float32)
        EXT.pixel_means(row.index, x, means.view, count)
        bound = x.double().abs().mean((2, 3)) * ((height * width) ** 0.5 + 5) * EPSILON
        assert ((means.checked().double() - x.double().mean((2, 3))).abs() <= bound).all()


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


def bits_convolution(row: native.NativeRow, count: int) -> None:
    """Widths of one, two and more bits; channels and outputs that fill no word and no panel."""
    kernel = bits_conv_rows()[row.index]
    for levels, bits in ((bipolar(1), 1), (TERNARY, 8), (twos(4), 4), (twos(8), 3)):
        for geometry, (images, height, width) in BITS_GEOMETRIES:
            size = geometry.out_channels, geometry.columns
            codes = torch.randint(0, 3 if levels == TERNARY else levels.most + 1, size, dtype=torch.uint8)
            weight = BitWeight(codes, levels, random(size[0], seed=2).abs())
            prepared, quantization = kernel.prepare(weight, geometry), Quantization(bits=bits)
            if kernel.refuses(geometry, levels, quantization, (images, height, width)):
                assert kernel.layout == "bits_lookups" and bits > 4
                continue
            x = random(images, geometry.in_channels, height, width)
            with threads(count):
                y = kernel.run(x, prepared, None, BitsConvProblem(geometry, quantization))
            assert torch.equal(y, bits_conv_reference(x, weight, None, geometry, quantization))


BITS_GEOMETRIES = (
    (Geometry(3, 9, (3, 3), (1, 1), (1, 1), (1, 1)), (2, 9, 7)),
    (Geometry(70, 66, (3, 3), (2, 2), (1, 1), (1, 1)), (1, 8, 5)),
    (Geometry(65, 3, (1, 1)), (0, 3, 3)),
)


def block_convolution(row: ConvKernel) -> None:
    shapes, sizes = ((48, 128), (39, 77), (3, 5)), (((1, 1, 1), 1), ((2, 5, 7), 2), ((2, 5, 7), 1), ((0, 3, 3), 2))
    for turn, (text, (out, columns)) in enumerate(itertools.product(BLOCKS, shapes)):
        geometry = Geometry(columns, out, (1, 1))
        packed = pack(of_blocks(out, columns, text, "float32").unpack()[..., None, None], f"block:{text}", axis=1)
        prepared, bias = row.prepare(packed, geometry), random(out, seed=1)
        for (images, height, width), count in sizes if SHARE == 1 else (sizes[turn % 4], sizes[(turn + 1) % 4]):
            x, other = random(images, columns, height, width), random(images, out, height, width)
            with threads(count):
                y = row.run(x, prepared, bias if count % 2 else None, ConvProblem.of(geometry))
                added = row.run(x, prepared, bias, ConvProblem.of(geometry, "relu"), other)
            assert_convolution(y, x, packed.unpack(), bias if count % 2 else None, geometry)
            plain = row.run(x, prepared, bias, ConvProblem.of(geometry))
            torch.testing.assert_close(added, (plain + other).relu())
        assert torch.equal(prepared.restore().unpack(), packed.unpack())


def convolution(row: ConvKernel) -> None:
    swept = 0
    for geometry, (images, height, width) in (*GEOMETRIES, *APART):
        if row.refuses(geometry) is None:
            swept += 1
            weight, bias = sparse_conv(geometry), random(geometry.out_channels, seed=1)
            x, prepared = random(images, geometry.in_channels, height, width), row.prepare(weight, geometry)
            for count in THREADS:
                with threads(count):
                    y = row.run(x, prepared, bias if count % 2 else None, ConvProblem.of(geometry))
                assert_convolution(y, x, weight, bias if count % 2 else None, geometry)
    assert swept


def hybrid_convolution(row: ConvKernel) -> None:
    """Dense groups at some places of the kernel and at nearly all; tiles of one tap and of several."""
    swept = 0
    for geometry, (images, height, width) in GEOMETRIES:
        text = "2:4+90%" if swept % 2 else "2:4+10%"
        if row.refuses(geometry) is None:
            swept += 1
            rule, size = parse(text), (geometry.out_channels, *geometry.kernel, geometry.in_channels)
            last, bias = random(*size), random(geometry.out_channels, seed=1)
            weight = (last * rule.project(last, absolute=True)).movedim(-1, 1).contiguous()
            x, prepared = (
                random(images, geometry.in_channels, height, width),
                row.prepare(pack(weight, rule, axis=1), geometry),
            )
            for count in THREADS:
                with threads(count):
                    y = row.run(x, prepared, bias if count % 2 else None, ConvProblem.of(geometry))
                assert_convolution(y, x, weight, bias if count % 2 else None, geometry)
            assert torch.equal(prepared.restore().unpack(), weight)
    assert swept


def whole_convolution(row: ConvKernel) -> None:
    swept = 0
    for place, (geometry, (images, height, width)) in enumerate(GEOMETRIES):
        if row.refuses(geometry) is None:
            swept += 1
            x = random(images, geometry.in_channels, height, width)
            quantization = (DYNAMIC, Quantization(0.03, 99))[place % 2]
            with threads(THREADS[place % len(THREADS)]):
                assert_whole(row, x, replace(ConvProblem.of(geometry), quantization=quantization), seed=place)
    assert swept


DRIVERS: dict[str, Callable] = {
    **{drive.__name__: drive for drive in (nm_mask, nm_tiles, nm_nonzero, nm_ties, nm_stripes, nm_compress)},
    **{drive.__name__: drive for drive in (nm_unbiased, nm_gradient, nm_conv_gradient, nm_sddmm)},
    **{drive.__name__: drive for drive in (norm, fused_block, squeeze_excite, attention)},
    **{drive.__name__: drive for drive in (attention_gradient, activation, column_sums, rotation)},
    "recurrent": recurrent,
    **{
        "nm_matmul": product,
        "hybrid_matmul": hybrid_product,
        "block_matmul": block_product,
        "bits_matmul": bits_product,
        "bits_conv": bits_convolution,
        "dense_matmul": product,
        "nm_conv": convolution,
        "hybrid_conv": hybrid_convolution,
        "block_conv": block_convolution,
        "dense_conv": convolution,
    },
    **{"depthwise_conv": convolution, "window_conv": whole_convolution},
}
"""Operation -> the sweep of one of its rows: with so many threads, or with each number of them."""

TABLE = {row.name: row for table in native.tables().values() for row in table}
TABLE |= {row.name: row for row in (*rows(), *convolutions()) if row.device == "cpu"}
"""Every row on a CPU; of products and convolutions the kernel that calls it."""


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if isinstance(row, Kernel | ConvKernel)])
def test_every_row_is_right_with_every_number_of_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SHARE", 1)
    test_every_row_is_right(name)


class Watched:
    """A row of float32 that is right, and what it was called with."""

    dtype, sparse = "float32", True

    def __init__(self) -> None:
        self.met: set[tuple[tuple[int, ...], int, int]] = set()

    def prepare(self, packed: Packed) -> Packed:
        return packed

    def run(self, x: Tensor, prepared: Packed, bias: Tensor | None, problem: Problem) -> Tensor:
        weight = prepared.unpack()
        self.met.add((tuple(weight.shape), len(x), torch.get_num_threads()))
        return torch.nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize("share", [SHARE, 1])
def test_blocks_meet_every_number_of_tokens_in_every_shape(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SHARE", share)
    row: Any = Watched()
    block_product(row)
    for shape in ((48, 128), (39, 77), (3, 5)):
        assert {tokens for out, tokens, _ in row.met if out == shape} == {count for count in TOKENS if count <= 65}
        assert (shape, 33, 2) in row.met


def test_products_meet_every_number_of_tokens_and_two_threads_few_and_many() -> None:
    row: Any = Watched()
    product_of_floats(row)
    assert {tokens for _, tokens, _ in row.met} == set(TOKENS)
    assert {tokens for _, tokens, count in row.met if count == 2} == {7, 8, 9, 33, 65, 130}


@pytest.mark.parametrize("name", TABLE)
def test_every_row_is_right(name: str) -> None:
    row = TABLE[name]
    assert row.operation in DRIVERS, f"{name}: no driver sweeps rows of {row.operation}; write one here"
    reason = row.unavailable() if isinstance(row, Kernel | ConvKernel) else native.unavailable(row.isa)
    if reason:
        pytest.skip(reason)
    if isinstance(row, Kernel | ConvKernel):
        DRIVERS[row.operation](row)
    else:
        for count in THREADS:
            DRIVERS[row.operation](row, count)


def test_every_operation_that_is_listed_is_swept() -> None:
    assert {one.operation for one in listing() if one.device == "cpu"} == set(DRIVERS)
    assert {one.name for one in listing() if one.device == "cpu"} == set(TABLE)
