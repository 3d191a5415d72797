"""Convolutions in int8: the bits of the reference, for every kind of range."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import each_row, threads
from tests.kernels.conv_cases import GEOMETRIES, WHOLE, assert_whole, sparse
from twofour.errors import KernelError
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry
from twofour.kernels.quantization import Quantization
from twofour.packing import Packed

RANGES = {
    "dynamic": Quantization(),
    "static": Quantization(0.02, 117),
    "bytes": Quantization(0.02, 117, torch.uint8, 0.05, 20),
    "signed bytes": Quantization(0.03, 0, torch.int8, 0.07, -9),
    "halves": Quantization(0.02, 117, torch.bfloat16),
}


@each_row(WHOLE)
def test_whole_numbers_give_the_bits_of_the_reference(row: ConvKernel) -> None:
    swept = 0
    for count, (geometry, (images, height, width)) in enumerate(GEOMETRIES):
        if row.refuses(geometry):
            assert geometry.groups > 1
            continue
        swept += 1
        x, ranged = torch.randn(images, geometry.in_channels, height, width), list(RANGES.values())[count % len(RANGES)]
        whole = x if ranged.dynamic else (x * 50 + 128).clamp(0, 255).to(torch.uint8)
        given, problem = (
            (x, x.bfloat16(), whole)[count % 3],
            ConvProblem.of(geometry, ("none", "relu", "relu6")[count % 3]),
        )
        other = torch.randn(images, geometry.out_channels, *geometry.output(height, width))
        added = (None, other, other.bfloat16(), other)[count % 4]
        with threads(1 + count % 2):
            assert_whole(row, given, replace(problem, quantization=ranged), added, seed=count)
    assert swept > 8


@each_row(WHOLE)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_any_geometry_in_whole_numbers(row: ConvKernel, data: st.DataObject) -> None:
    def pair(least: int, most: int) -> tuple[int, int]:
        return data.draw(st.integers(least, most)), data.draw(st.integers(least, most))

    channels = data.draw(st.sampled_from([4, 12, 64, 72] if row.sparse else [1, 3, 16, 65]))
    kernel, dilation, before, after = pair(1, 4), pair(1, 3), pair(0, 3), pair(0, 3)
    geometry = Geometry(channels, data.draw(st.integers(1, 70)), kernel, pair(1, 4), before, after, dilation)
    height, width = (data.draw(st.integers(d * (k - 1) + 1, 17)) for d, k in zip(dilation, kernel, strict=True))
    ranged, seed = RANGES[data.draw(st.sampled_from(sorted(RANGES)))], data.draw(st.integers(0, 99))
    x = torch.randn(data.draw(st.integers(0, 3)), channels, height, width) * 3
    with threads(data.draw(st.integers(1, 3))):
        activation = data.draw(st.sampled_from(["relu", "relu6"]))
        assert_whole(row, x, replace(ConvProblem.of(geometry, activation), quantization=ranged), seed=seed)


@each_row(WHOLE)
def test_what_is_not_finite_takes_its_image_or_the_ends_of_the_range(row: ConvKernel) -> None:
    geometry = Geometry(16, 21, (3, 3), (1, 1), (1, 1), (1, 1))
    x, prepared = torch.randn(3, 16, 5, 6), row.prepare(sparse(geometry), geometry)
    clean = row.run(x, prepared, None, ConvProblem.of(geometry))
    for odd in (float("nan"), float("inf")):
        x[1, 3, 2, 2] = odd
        y = row.run(x, prepared, None, ConvProblem.of(geometry))
        assert y[1].isnan().all() and torch.equal(y[::2], clean[::2])  # as a token of an int8 product
        y = row.run(x, prepared, None, ConvProblem.of(geometry, "relu6"))
        assert y[1].isnan().all() and torch.equal(y[::2], clean[::2].clamp(0, 6)), "a bound hides none"
    static = replace(ConvProblem.of(geometry), quantization=RANGES["static"])
    assert_whole(row, x, static)


@each_row(WHOLE)
def test_whole_weights_come_back_as_they_were_rounded(row: ConvKernel) -> None:
    for geometry in (Geometry(64, 33, (3, 2)), Geometry(16, 200, (1, 1))):
        weight = sparse(geometry, 7) * torch.rand(geometry.out_channels, 1, 1, 1)
        weight[3] = 0
        prepared = row.prepare(weight, geometry)
        found = prepared.restore()
        assert isinstance(found, Packed) and found.header.shape == weight.shape
        assert ((found.unpack() - weight).abs() <= weight.abs().amax((1, 2, 3), keepdim=True) / 253).all()
        for again in (row.prepare(found, geometry), prepared.again(found.unpack())):  # a file's, a graph's
            assert torch.equal(again.tensor, prepared.tensor)
        turned = row.prepare(-2 * found.unpack(), geometry)  # as a normalisation scales it
        assert torch.equal(replace(turned.restore(), scales=None).unpack(), -replace(found, scales=None).unpack())


def test_what_whole_numbers_cannot_read_is_refused() -> None:
    for row in (row for row in WHOLE if row.unavailable() is None):
        geometry = Geometry(16, 8, (3, 3))
        prepared, problem = row.prepare(sparse(geometry), geometry), ConvProblem.of(geometry)
        with pytest.raises(KernelError, match="operands of a convolution"):  # bytes without a range
            row.run(torch.zeros(1, 16, 9, 9, dtype=torch.uint8), prepared, None, problem)
        with pytest.raises(KernelError, match="bytes made for another kernel"):
            row.run(torch.randn(1, 16, 9, 9), prepared, None, ConvProblem.of(Geometry(16, 8, (5, 5))))
        with pytest.raises(KernelError, match="operands of a convolution"):
            row.run(torch.randn(1, 16, 9, 9), prepared, None, problem, torch.randn(1, 8, 9, 9))
        with pytest.raises(KernelError, match="whole numbers as inputs"):
            row.run(torch.randn(1, 16, 9, 9), prepared, None, replace(problem, quantization=Quantization(bits=4)))
        assert "groups" in (row.refuses(Geometry(16, 8, (3, 3), groups=2)) or "")
        assert "int32" in (row.refuses(Geometry(1 << 16, 8, (3, 3))) or "")
        assert (row.refuses(Geometry(6, 8, (2, 2))) is None) is not row.sparse
