"""Sweeps of convolutions, of each geometry that a row takes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from tests.conftest import threads
from tests.kernels.conv_cases import APART, GEOMETRIES, assert_convolution, assert_whole
from tests.kernels.conv_cases import sparse as sparse_conv
from tests.kernels.sweeps import products
from tests.kernels.sweeps.operands import (
    THREADS,
    random,
)
from tests.kernels.sweeps.products import BLOCKS, of_blocks
from twofour import native
from twofour.kernels.bits_matmul import TERNARY, BitWeight, bipolar, twos
from twofour.kernels.bits_matmul.conv import BitsConvProblem, bits_conv_reference, bits_conv_rows
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry
from twofour.kernels.nm_matmul import DYNAMIC, Quantization
from twofour.packing import pack
from twofour.patterns import parse


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
        for (images, height, width), count in (
            sizes if products.SHARE == 1 else (sizes[turn % 4], sizes[(turn + 1) % 4])
        ):
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
