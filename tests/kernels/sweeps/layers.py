"""Sweeps of rows of what stands between the products of a model."""

from __future__ import annotations

import itertools

import torch

from tests.kernels.sweeps.operands import (
    EPSILON,
    EXT,
    HALVES,
    Guarded,
    amid_nan,
    random,
)
from twofour.kernels.attention import reference as attention_reference
from twofour.kernels.attention import whole_reference as whole_attention
from twofour.kernels.epilogue import ACTIVATIONS
from twofour.kernels.fused_block import Expression, program
from twofour.kernels.norm import reference as norm_reference
from twofour.kernels.recurrent import CELLS, recurrent_reference
from twofour.kernels.rotation import reference as rotation_reference
from twofour.kernels.squeeze_excite import reference as squeeze_excite_reference
from twofour.kernels.table import find
from twofour.native import NativeRow


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
