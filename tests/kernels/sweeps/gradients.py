"""Sweeps of rows of a backward pass: pruned gradients, their products, those of attention."""

from __future__ import annotations

import itertools
from functools import cache

import torch
from torch import Tensor

from tests.kernels.sweeps.operands import (
    EPSILON,
    EXT,
    Guarded,
    amid_nan,
    random,
)
from twofour.kernels.attention import reference as attention_reference
from twofour.kernels.conv import Geometry
from twofour.kernels.nm_conv_gradient import nm_conv_gradient_reference
from twofour.kernels.nm_gradient import MODES, nm_gradient_reference
from twofour.kernels.nm_matmul import from_layout
from twofour.kernels.nm_matmul.layout import to_layout
from twofour.kernels.nm_sddmm import nm_sddmm_reference
from twofour.kernels.nm_unbiased import nm_unbiased_reference
from twofour.native import NativeRow
from twofour.packing import HEADER_BYTES, kept, layout_header, pack
from twofour.patterns import parse


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
