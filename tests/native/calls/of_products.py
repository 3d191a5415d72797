"""Calls of products, one after another too, of convolutions and of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.native.calls.operands import EXT, Call, sparse
from twofour import native, packing
from twofour.kernels.bits_matmul import GROUPS, BitWeight, CodeSteps, bits_rows, twos
from twofour.kernels.bits_matmul.coded import PLAINLY
from twofour.kernels.bits_matmul.conv import CodedImages, bits_conv_rows
from twofour.kernels.block_matmul import block_rows
from twofour.kernels.conv import Geometry
from twofour.kernels.dense_conv import direct_rows, winograd_rows
from twofour.kernels.dense_matmul import native_dense_rows
from twofour.kernels.nm_conv.layout import to_conv_layout
from twofour.kernels.nm_matmul import native_rows
from twofour.kernels.nm_matmul.hybrid import hybrid_rows
from twofour.kernels.window_conv import window_conv_rows
from twofour.patterns import parse

BEGIN, CODES = torch.tensor([-9, 0, 1 << 29], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.uint8)
STEPS = CodeSteps(1.0, 1.0, BEGIN, CODES, CODES, torch.zeros_like(CODES), CODES // 2, torch.ones(1, 256) > 0).table()


def fused(scale: int) -> Iterator[Call]:
    """Calls of products in a row, of every family: with a gate and norms, and one alone."""
    rows, tokens = 32 * scale, 3 * scale
    x, bias, hidden = torch.randn(tokens, 128), torch.randn(rows), torch.randn(64)
    other, y = torch.randn(tokens, rows), torch.empty(tokens, rows)
    norm = native.best("norm", dtype="float32").index
    before, after = (norm, torch.randn(128), torch.randn(128), 1e-5, True), (norm, bias, bias.clone(), 1e-5, True)
    each = {
        row.layout: row
        for row in (*native_rows(), *hybrid_rows(), *block_rows(), *native_dense_rows())
        if row.unavailable() is None
    }
    for row in each.values():  # of one of each layout
        place = native.products()[row.name]
        blocks, dense = row.operation == "block_matmul", row.operation == "dense_matmul"
        weights = [sparse(n, m) for n, m in ((64, 128), (64, 128), (rows, 64), (rows, 128))]
        if blocks:
            weights = [torch.ones_like(weight) * (torch.arange(weight.shape[1]) % 8 < 4) for weight in weights]
        pattern = "block:8x4@0.5" if blocks else "2:4+25%" if row.operation == "hybrid_matmul" else "2:4"
        first, gate, last, alone = (
            row.prepare(weight if dense else packing.pack(weight, pattern, dtype=row.dtype)).tensor
            for weight in weights
        )
        parts = (first, hidden, gate, hidden.clone(), last, bias)
        beside = (other, *before, *after, y.clone(), *((True, 1.0, 0, 1.0, 0),) * 2, False, None, 1.0, 0, 1)
        yield row.isa, EXT.fused_matmul, [place, place, place, x, *parts, y, 64, 1, 0, 1, *beside]
        parts = (None, None, None, None, alone, bias)
        yield row.isa, EXT.fused_matmul, [-1, -1, place, x, *parts, y, 0, 0, 1, 1, *beside]
        if row.dtype != "int8":
            continue
        read, whole, no_norm = (
            (x * 32 + 128).clamp(0, 255).byte(),
            torch.zeros(tokens, rows, dtype=torch.uint8),
            (-1, None, None, 0.0, False),
        )
        ranges = ((False, 0.03, 128, 0.03, 10), (False, 0.03, 10, 1.0, 0), True, whole, 0.03, 128)
        parts, beside = (first, hidden, None, None, last, bias), (other, *no_norm, *after, y.clone(), *ranges, 1)
        yield row.isa, EXT.fused_matmul, [place, -1, place, read, *parts, y, 64, 1, 0, 1, *beside]


def products(scale: int) -> Iterator[Call]:
    """Calls of the products, each with a bias and a second operand."""
    rows, tokens = 32 * scale, 3 * scale
    x, bias = torch.randn(tokens, 128), torch.randn(rows)
    other, y = torch.randn(tokens, rows), torch.empty(tokens, rows)
    for row in native_rows():
        packed = row.prepare(packing.pack(sparse(rows, 128), "2:4", dtype=row.dtype)).tensor
        yield row.isa, EXT.nm_matmul, [row.index, x, packed, bias, y, 1, 1, other, True, 1.0, 0, 1.0, 0, 1]
        if row.layout in ("panels", "pairs", "bf16_panels"):
            yield row.isa, EXT.nm_matmul_columns, [row.index, x.T.contiguous(), packed, y.T.contiguous(), 1]
    regions = sparse(rows, 128) + torch.randn(rows, 128) * (torch.arange(128) % 16 < 4)
    for row in hybrid_rows():
        packed = row.prepare(packing.pack(regions, "2:4+25%", dtype=row.dtype)).tensor
        yield row.isa, EXT.hybrid_matmul, [row.index, x, packed, bias, y, 1, 1, other, True, 1.0, 0, 1.0, 0, 1]
    blocks = torch.randn(rows, 128) * (torch.arange(128) % 16 < 4)
    for row in block_rows():
        packed = row.prepare(packing.pack(blocks, "block:8x4@0.75", dtype=row.dtype)).tensor
        yield row.isa, EXT.block_matmul, [row.index, x, packed, bias, y, 1, 1, other, True, 1.0, 0, 1.0, 0, 1]
    codes = BitWeight(torch.randint(0, 4, (rows, 128), dtype=torch.uint8), twos(2), torch.ones(rows))
    kept = BitWeight(torch.where(torch.arange(128) % 4 < 2, codes.codes, 2).to(torch.uint8), twos(2), codes.scales)
    for row in bits_rows():
        packed, many = row.prepare(kept if row.sparse else codes).tensor, (True, 1.0, 0, 1.0, 0, 3, 1, False, 1)
        yield row.isa, EXT.bits_matmul, [row.index, x, packed, bias, y, 1, 1, other, *PLAINLY, *many]
        marked = torch.zeros(tokens, 129, dtype=torch.uint8), torch.zeros(tokens, rows + 1, dtype=torch.uint8)
        handing = torch.ones(2, rows), STEPS, True, (0, 3), 0.4
        of_codes = [row.index, marked[0], packed, bias, marked[1], 2, 0, None, *handing, False, *many[1:]]
        yield row.isa, EXT.bits_matmul, of_codes
        if row.layout == GROUPS:
            packed = row.prepare(
                BitWeight(codes.codes, twos(2), torch.ones(rows, 4), torch.zeros(rows, 4, dtype=torch.int8))
            )
            many = (True, 1.0, 0, 1.0, 0, 255, 0, False, 1)
            yield row.isa, EXT.bits_matmul, [row.index, x, packed.tensor, bias, y, 1, 1, other, *PLAINLY, *many]
    geometry, codes = Geometry(8, 12, (3, 3)), BitWeight(codes.codes[:12, :72].contiguous(), twos(2), torch.ones(12))
    image, sizes = torch.randn(2 * scale, 8, 6, 6).contiguous(memory_format=torch.channels_last), ([6, 6], [4, 4])
    images, answer = CodedImages(False, 12, 2, 2, 2).image_bytes, torch.empty(2 * scale, 12, 4, 4)
    affine, of_codes = torch.ones(2, 12), (1.0, 0, 3, 1, False)
    for row in bits_conv_rows():
        packed, axes = row.prepare(codes, geometry).tensor, ((3, 1, 0, 1), (3, 1, 0, 1))
        last = answer.contiguous(memory_format=torch.channels_last)
        many = (8, 12, *axes, *sizes)
        means = torch.empty(2 * scale, 12, 1, 1)
        for to, back in (((0, 1, 1), last), ((0, 0, 2), means)):
            given = [row.index, image, packed, bias[:12], None, affine, last.clone(), back, *many, to]
            yield row.isa, EXT.bits_conv, [*given, True, *of_codes, True, 1]
        numbers, coded = (
            torch.zeros(4 * 4 * row.panel, dtype=torch.uint8),
            torch.empty(2 * scale, images, dtype=torch.uint8),
        )
        yield (
            row.isa,
            EXT.bits_conv,
            [row.index, image, packed, None, numbers, None, None, coded, *many, (0, 3, 2), False, *of_codes, False, 1],
        )
    for row in native_dense_rows():
        dense = row.prepare(torch.randn(rows, 128)).tensor
        yield row.isa, EXT.dense_matmul, [row.index, x, dense, bias, y, 1, 1, other, True, 1.0, 0, 1.0, 0, 1]
        if row.looks_up:
            places = torch.arange(tokens).clamp_max(rows - 1)
            yield row.isa, EXT.dense_rows, [row.index, dense, places, torch.empty(tokens, 128, dtype=row.value), 1]
    yield from fused(scale)
    geometry = Geometry.of(torch.nn.Conv2d(8, 12, 3))
    weight = sparse(12 * 9, 8).view(12, 3, 3, 8).permute(0, 3, 1, 2)
    image, answer = (
        torch.randn(size).contiguous(memory_format=torch.channels_last)
        for size in ((2 * scale, 8, 6, 6), (2 * scale, 12, 4, 4))
    )
    axes = ((3, 1, 0, 1), (3, 1, 0, 1))
    filters, codes = torch.randn(9, 8), (4, 1)
    for row in native.rows("depthwise_conv"):
        yield (
            row.isa,
            EXT.depthwise_conv,
            [
                row.index,
                image,
                filters,
                bias[:8],
                answer[:, :8].contiguous(memory_format=torch.channels_last),
                *axes,
                *codes,
            ],
        )
    small, scaled = torch.randn(4, 8), image.clone(memory_format=torch.preserve_format)
    for row in native.rows("squeeze_excite"):
        weights = small, bias[:4], small.clone(), bias[:8]
        yield row.isa, EXT.squeeze_excite, [row.index, image, *weights, scaled, *codes, 1]
    for row in native.rows("column_sums"):
        yield row.isa, EXT.pixel_means, [row.index, image, torch.empty(image.shape[:2]), 1]
    for row in native.rows("nm_conv"):
        yield (
            row.isa,
            EXT.nm_conv,
            [row.index, image, to_conv_layout(weight, geometry), bias[:12], answer.clone(), answer, 1, *axes, 1, 1],
        )
    rule = parse("2:4+25%")
    regions = torch.randn(12, 3, 3, 8)
    regions = (regions * rule.project(regions, absolute=True)).movedim(-1, 1)
    for row in native.rows("hybrid_conv"):
        moved = to_conv_layout(regions, geometry, rule)
        given = [row.index, image, moved, bias[:12], answer.clone(), answer, 1, *axes, 1, 1]
        yield row.isa, EXT.hybrid_conv, given
    for row in window_conv_rows():
        for x, ranged in ((image, (True, 1.0, 0)), (image.to(torch.uint8), (False, 0.1, 3))):
            moved = row.prepare(weight, geometry).tensor
            given = row.index, x, moved, bias[:12], answer.clone(), answer, *axes, 1, *ranged, 1.0, 0, 1
            yield row.isa, EXT.window_conv, [*given]
    for row in (*direct_rows(), *winograd_rows()):
        moved = row.prepare(weight, geometry).tensor
        yield (
            row.isa,
            EXT.dense_conv,
            [row.index, image, moved, bias[:12], answer.clone(), answer, 1, *axes, 1, 1],
        )
        between = [8, 4, 8, 6, 6, 3, 1, 1, 1, 3, 1, 1, 1], [1, 1, 12, 4, 4, 3, 1, 0, 1, 3, 1, 0, 1]
        first = next(name for name in native.convolutions() if "depthwise" in name and name.endswith(f"__{row.isa}"))
        chained = [native.convolutions()[first], row.native_convolution], image, [filters, moved], [bias[:8], bias[:12]]
        yield row.isa, EXT.conv_chain, [*chained, [None, answer.clone()], answer, [*between], 2, 1]


def recurrent(scale: int) -> Iterator[Call]:
    """Calls of recurrent layers, a projected LSTM's with every operand there is."""
    inner, width, batch = 12 * scale, 8, 2
    x, sizes = torch.randn(3, 4), torch.tensor([2, 1])
    for row in native.rows("recurrent"):
        products = [one for one in native_dense_rows() if (one.dtype, one.isa) == ("float32", row.isa)]
        product = next(iter(products), native_dense_rows()[0])
        weights = [
            product.prepare(torch.randn(*shape)).tensor
            for shape in ((4 * inner, 4), (4 * inner, width), (width, inner))
        ]
        biases = torch.randn(4 * inner), torch.randn(4 * inner)
        first = torch.randn(2, batch, width), torch.randn(2, batch, inner)
        last = torch.zeros(3, width), torch.zeros(2, batch, width), torch.zeros(2, batch, inner)
        given = x, sizes, weights[0], biases[0], weights[1], biases[1], weights[2], *first, *last
        yield row.isa, EXT.recurrent, [row.index, 0, *[product.native_product] * 3, *given, 1, 1]
