"""Geometries and weights of convolutions, and how near to float64, or to whole numbers, each row has to come."""

from dataclasses import replace

import torch
from torch import Tensor

from twofour.kernels import convolutions
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry
from twofour.kernels.nm_conv import nm_conv_reference
from twofour.kernels.window_conv import window_conv_reference
from twofour.packing import Packed
from twofour.patterns import parse

EPSILON = torch.finfo(torch.float32).eps
APART_ROWS = ("depthwise_conv", "block_conv", "hybrid_conv")  # of other weights: their sweeps are in sweeps/
WHOLE = [row for row in convolutions() if row.dtype == "int8"]
ROWS = [row for row in convolutions() if not row.close and row not in WHOLE and row.operation not in APART_ROWS]
DEPTHWISE = [row for row in convolutions() if row.operation == "depthwise_conv"]
NATIVE = [row for row in ROWS if row.layout == "pairs"]
BLOCKS = [row for row in NATIVE if "blocks" in row.name]

# Geometry (in and out channels, kernel, stride, before, after, dilation, groups); images, height, width.
GEOMETRIES = [
    (Geometry(16, 8, (1, 1)), (1, 7, 7)),
    (Geometry(64, 33, (1, 1)), (3, 7, 7)),
    (Geometry(512, 10, (1, 1), groups=2), (1, 24, 23)),
    (Geometry(64, 33, (1, 1), (2, 2)), (1, 15, 14)),
    (Geometry(64, 40, (3, 3), (1, 1), (1, 1), (1, 1)), (1, 14, 14)),
    (Geometry(128, 130, (3, 3), (2, 2), (1, 1), (1, 1)), (1, 15, 14)),
    (Geometry(4, 5, (3, 3), (1, 1), (1, 1), (1, 1)), (18, 5, 6)),
    (Geometry(68, 7, (5, 5), (1, 1), (2, 2), (2, 2)), (2, 11, 9)),
    (Geometry(12, 17, (7, 7), (2, 2), (3, 3), (3, 3)), (1, 23, 20)),
    (Geometry(24, 12, (3, 2), (3, 1), (0, 2), (1, 0), (2, 3), 3), (2, 13, 12)),
    (Geometry(20, 6, (1, 9), (1, 4), (0, 4), (0, 4)), (3, 1, 70)),
    (Geometry(8, 96, (3, 3), (1, 1), (5, 5), (5, 5)), (1, 2, 2)),
    (Geometry(32, 68, (5, 1), (1, 2), (0, 1), (0, 1), (1, 3), 4), (1, 5, 1)),
    (Geometry(16, 8, (1, 3), (2, 2), (0, 2), (0, 2), (2, 2), 4), (2, 1, 1)),
]

APART = [
    (Geometry(70, 70, (3, 3), (1, 1), (1, 1), (1, 1), groups=70), (2, 11, 30)),
    (Geometry(16, 16, (5, 5), (2, 2), (1, 1), (2, 2), groups=16), (1, 14, 23)),
    (Geometry(97, 97, (7, 7), (1, 1), (3, 3), (3, 3), groups=97), (1, 7, 7)),
    (Geometry(5, 5, (2, 3), (3, 1), (9, 0), (9, 4), (1, 2), 5), (3, 4, 9)),
]
"""The same with a filter of its own for each channel."""


def sparse(geometry: Geometry, seed: int = 0) -> Tensor:
    shape = (geometry.out_channels, geometry.in_channels // geometry.groups, *geometry.kernel)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if geometry.in_channels == geometry.groups:
        return weight
    return (weight * parse("2:4").project(weight.movedim(1, -1), absolute=True).movedim(-1, 1)).contiguous()


def assert_convolution(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> None:
    """|err| <= 4 eps K^0.5 |x||w| in norm over all outputs, against float64."""
    want = nm_conv_reference(x.double(), weight, bias, geometry)
    assert y.shape == want.shape
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.isfinite(y).all()
    sizes = nm_conv_reference(x.double().abs(), weight.abs(), bias if bias is None else bias.abs(), geometry)
    assert (y.double() - want).norm() <= 4 * EPSILON * sizes.norm()


def assert_whole(
    row: ConvKernel, x: Tensor, problem: ConvProblem, other: Tensor | None = None, seed: int = 0
) -> Tensor:
    """An int8 row gives the bits of the reference; returns its answer."""
    geometry = problem.geometry
    dense = torch.randn(geometry.out_channels, geometry.in_channels, *geometry.kernel)
    weight = sparse(geometry, seed) if row.sparse else dense
    prepared, bias = row.prepare(weight, geometry), torch.randn(geometry.out_channels) if seed % 2 else None
    found = prepared.restore()
    assert isinstance(found, Packed) and found.scales is not None
    scales = found.scales.view(geometry.out_channels, -1)[:, 0]
    whole = replace(found, scales=None).unpack()
    y = row.run(x, prepared, bias, problem, other)
    assert torch.equal(y, window_conv_reference(x, whole, scales, bias, problem, other)), (geometry, problem)
    assert y.is_contiguous(memory_format=torch.channels_last)
    return y
