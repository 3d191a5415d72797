"""Every convolution row against float64, at odd sizes, with poisoned outputs (conftest fills torch.empty)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import OF_FLOATS, assert_undisturbed, each_row, threads
from tests.kernels.conv_cases import BLOCKS, DEPTHWISE, GEOMETRIES, NATIVE, ROWS, WHOLE, assert_convolution, sparse
from tests.turns import in_turn
from twofour import native
from twofour.errors import KernelError, PackingError
from twofour.kernels import find
from twofour.kernels.conv import ACTIVATIONS, ConvEpilogue, ConvKernel, ConvProblem, Geometry
from twofour.kernels.dense_conv import ONEDNN_CONV, PLAIN_CONV
from twofour.kernels.nm_conv import nm_conv_reference


def test_every_level_has_a_row() -> None:
    compiled = {row.isa for rows in native.tables().values() for row in rows}
    assert {row.isa for row in BLOCKS} == compiled & set(native.isa_levels()) - set(OF_FLOATS) != set()


@each_row(ROWS)
def test_odd_geometries_in_three_threads(row: ConvKernel, count: int = 3) -> None:
    generator = torch.Generator().manual_seed(count)
    with threads(count):
        for geometry, (images, height, width) in GEOMETRIES:
            if row.refuses(geometry):
                assert "1x1" in row.name or (row is ONEDNN_CONV and geometry.scattered)
                continue
            weight = sparse(geometry, count)
            x = torch.randn(images, geometry.in_channels, height, width, generator=generator)
            bias = torch.randn(geometry.out_channels, generator=generator) if count % 2 else None
            y = row.run(x, row.prepare(weight, geometry), bias, ConvProblem.of(geometry))
            assert_convolution(y, x, weight, bias, geometry)


@each_row(BLOCKS)
def test_pixels_in_a_row_end_in_a_vector_a_half_of_one_or_less(row: ConvKernel) -> None:
    geometry = Geometry(68, 35, (1, 1))
    weight, bias = sparse(geometry), torch.randn(35)
    prepared = row.prepare(weight, geometry)
    for pixels in (16 * vectors + rest for vectors in (*range(5), 7, 8) for rest in (1, 8, 9)):
        x = torch.randn(1, 68, 1, pixels, generator=torch.Generator().manual_seed(pixels))
        y = row.run(x, prepared, bias, ConvProblem.of(geometry))
        assert_convolution(y, x, weight, bias, geometry)


HALVES = [(1, 5, 10), (1, 3, 22), (1, 9, 9), (1, 9, 11), (1, 7, 21), (1, 7, 23), (1, 9, 20), (3, 5, 13), (3, 7, 7)]
HALVES += [(1, 11, 19), (1, 9, 25), (1, 11, 22), (2, 9, 17), (2, 10, 22)]
"""Images, height, width of which a 1x1 convolution takes vectors across rows, the last one of one to eight pixels."""


@each_row(BLOCKS)
@pytest.mark.parametrize("count", [1, 2])
def test_the_last_vector_of_all_pixels_is_a_half(row: ConvKernel, count: int) -> None:
    """Beside those that are a whole one; scratch memory holds NaN before, as the answer does."""
    geometry, problem = Geometry(68, 35, (1, 1)), ConvProblem.of(Geometry(68, 35, (1, 1)))
    weight, bias = sparse(geometry), torch.randn(35)
    prepared = row.prepare(weight, geometry)
    with threads(count):
        for images, height, width in [*HALVES, (1, 5, 5), (1, 3, 19), (1, 9, 17), (1, 13, 13)]:
            size = images, 68, height, width
            row.run(torch.full(size, torch.nan), prepared, bias, problem)
            x = torch.randn(size, generator=torch.Generator().manual_seed(width))
            assert_convolution(row.run(x, prepared, bias, problem), x, weight, bias, geometry)


@each_row(BLOCKS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_geometry(row: ConvKernel, data: st.DataObject) -> None:
    def pair(least: int, most: int) -> tuple[int, int]:
        return data.draw(st.integers(least, most)), data.draw(st.integers(least, most))

    groups = data.draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    channels, outputs = 4 * data.draw(st.integers(1, 36 // groups)) * groups, data.draw(st.integers(1, 40)) * groups
    kernel, dilation = pair(1, 5), pair(1, 3)
    geometry = Geometry(channels, outputs, kernel, pair(1, 4), pair(0, 3), pair(0, 3), dilation, groups)
    height, width = (data.draw(st.integers(d * (k - 1) + 1, 24)) for d, k in zip(dilation, kernel, strict=True))
    images, seed = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 2**31))
    x = torch.randn(images, channels, height, width, generator=torch.Generator().manual_seed(seed))
    weight = sparse(geometry, seed)
    with threads(data.draw(st.integers(1, 3))):
        y = row.run(x, row.prepare(weight, geometry), None, ConvProblem.of(geometry))
    assert_convolution(y, x, weight, None, geometry)


@each_row(ROWS)
@in_turn("activation", ["none", "relu", "relu6", "gelu", "silu"])
def test_epilogues_add_then_activate(row: ConvKernel, activation: str) -> None:
    geometry = Geometry(16, 21, (1, 1))
    weight, x, bias = sparse(geometry), torch.randn(2, 16, 5, 6), torch.randn(21)
    plain = nm_conv_reference(x, weight, bias, geometry)
    apply = ConvEpilogue(activation).apply
    prepared = row.prepare(weight, geometry)
    for other in (None, torch.randn(2, 21, 5, 6)):
        want = apply(plain if other is None else plain + other)
        before = torch.zeros(0) if other is None else other.clone()
        torch.testing.assert_close(
            row.run(x, prepared, bias, ConvProblem.of(geometry, activation), other), want, atol=1e-5, rtol=1e-5
        )
        assert other is None or torch.equal(other, before)


@each_row(NATIVE)
def test_infinities_stay_where_they_are_read(row: ConvKernel) -> None:
    geometry = Geometry(12, 5, (1, 1) if "1x1" in row.name else (3, 3))
    weight, x = sparse(geometry), torch.randn(1, 12, 9, 9)
    clean = row.run(x, row.prepare(weight, geometry), None, ConvProblem.of(geometry))
    x[0, 3, 0, 0] = float("inf")
    x[0, 11, 0, 0] = float("nan")
    y = row.run(x, row.prepare(weight, geometry), None, ConvProblem.of(geometry))
    assert torch.equal(y[..., 1:, 1:], clean[..., 1:, 1:])
    keeps = weight[:, [3, 11], 0, 0].ne(0).any(1)
    assert torch.equal(~torch.isfinite(y[0, :, 0, 0]), keeps)
    relu = row.run(x, row.prepare(weight, geometry), None, ConvProblem.of(geometry, "relu"))
    assert torch.equal(relu.isnan(), torch.relu(y).isnan())


@each_row(BLOCKS)
def test_memory_formats_and_views(row: ConvKernel) -> None:
    geometry = Geometry(16, 8, (3, 3), (1, 1), (1, 1), (1, 1))
    weight = sparse(geometry)
    prepared, wide = row.prepare(weight, geometry), torch.randn(4, 32, 10, 12)
    for x in (wide[:, :16], wide[::2, 16:], wide[:, ::2].to(memory_format=torch.channels_last), wide[:1, :16, 2:, 3:]):
        assert_convolution(row.run(x, prepared, None, ConvProblem.of(geometry)), x, weight, None, geometry)


@each_row(BLOCKS)
def test_calls_from_several_threads_do_not_disturb_each_other(row: ConvKernel) -> None:
    geometry = Geometry(32, 16, (3, 3), (1, 1), (1, 1), (1, 1))
    prepared = row.prepare(sparse(geometry), geometry)
    inputs = [torch.randn(n, 32, 4 + n, 9) for n in (1, 2, 3)]
    want = [row.run(x, prepared, None, ConvProblem.of(geometry)) for x in inputs]
    assert_undisturbed(lambda x: row.run(x, prepared, None, ConvProblem.of(geometry)), inputs, want)


def test_groups_with_dilation_and_stride_never_reach_onednn_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it can end the process, which no `except` sees. An image of one pixel has the strides of both orders."""
    geometry, seen = Geometry(32, 68, (5, 1), (1, 2), (0, 1), (0, 1), (1, 3), 4), []
    assert geometry.scattered
    for sound in (replace(geometry, groups=1), replace(geometry, dilation=(1, 1)), replace(geometry, stride=(1, 1))):
        assert not sound.scattered and ONEDNN_CONV.refuses(sound) is ONEDNN_CONV.unavailable()
    assert "can end the process" in (ONEDNN_CONV.refuses(geometry) or "")
    conv2d = torch.conv2d
    with pytest.raises(KernelError, match="is not run on this convolution"):
        ONEDNN_CONV.prepare(torch.randn(68, 8, 5, 1), geometry)

    def noted(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        seen.extend(tensor for tensor in (x, weight) if tensor.dtype is torch.float32)  # the reference's are float64
        return conv2d(x, weight, *rest)

    monkeypatch.setattr(torch, "conv2d", noted)
    for held, sizes in (
        (geometry, ((5, 1), (7, 9))),
        (Geometry(16, 8, (1, 3), (2, 2), (0, 2), (0, 2), (2, 2), 4), ((1, 1), (3, 1))),
    ):
        weight = torch.randn(held.out_channels, held.in_channels // held.groups, *held.kernel)
        for size in sizes:
            x = torch.randn(1, held.in_channels, *size).to(memory_format=torch.channels_last)
            assert_convolution(
                PLAIN_CONV.run(x, PLAIN_CONV.prepare(weight, held), None, ConvProblem.of(held)), x, weight, None, held
            )
    assert len(seen) == 8
    for tensor in seen:
        assert tensor.stride() == torch.empty(tensor.shape).stride()


def test_what_does_not_fit_is_refused() -> None:
    row, geometry = next(row for row in BLOCKS if row.unavailable() is None), Geometry(16, 8, (3, 3))
    prepared = row.prepare(sparse(geometry), geometry)
    for x in (torch.randn(16, 9, 9), torch.randn(1, 12, 9, 9), torch.randn(1, 16, 9, 9).double()):
        with pytest.raises(KernelError, match="operands of a convolution"):
            row.run(x, prepared, None, ConvProblem.of(geometry))
    with pytest.raises(KernelError, match="smaller than the kernel"):
        row.run(torch.randn(1, 16, 2, 9), prepared, None, ConvProblem.of(geometry))
    with pytest.raises(KernelError, match="operands of a convolution"):
        row.run(torch.randn(1, 16, 9, 9), prepared, None, ConvProblem.of(geometry, "none"), torch.randn(1, 8, 9, 9))
    damaged = prepared.copy()
    damaged.tensor[0] = 0
    for weight, other in (
        (prepared, Geometry(16, 8, (5, 5))),
        (prepared, Geometry(16, 7, (3, 3))),
        (damaged, geometry),
    ):
        with pytest.raises(KernelError, match="bytes made for another kernel"):
            row.run(torch.randn(1, 16, 9, 9), weight, None, ConvProblem.of(other))
    with pytest.raises(PackingError, match="does not obey 2:4"):
        row.prepare(torch.randn(8, 16, 3, 3), geometry)
    assert "not a multiple of 4" in (row.refuses(Geometry(3, 8, (7, 7))) or "")
    assert "taps" in (row.refuses(Geometry(4, 8, (1, 65))) or "")
    with pytest.raises(KernelError, match="no such kernel of a convolution"):
        find("nm_conv_2x4_f32_best__avx1024", ConvKernel)


def test_a_level_above_the_cap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_ISA", "scalar")
    assert all("needs" in (row.unavailable() or "") for row in (*ROWS, *WHOLE) if row.isa not in ("scalar", "any"))


def test_products_of_a_set_without_convolutions_leave_residuals_to_portable_code(monkeypatch):
    """As on aarch64, where nm_matmul has rows for NEON and nm_conv has none."""
    from twofour.kernels.nm_conv import cpu

    portable = [row for row in cpu.native_conv_rows() if row.isa == "scalar"]
    monkeypatch.setattr(cpu, "native_conv_rows", lambda: portable)
    rows = [row for row in cpu.pointwise_rows() if row.pattern == "2:4"]
    assert {row.isa for row in rows} > {"scalar"} and all(row.residual == portable[0] for row in rows)


@each_row(DEPTHWISE)
@given(channels=st.integers(1, 80), data=st.data(), activation=st.sampled_from(list(ACTIVATIONS)),
       more=st.booleans(), seed=st.integers(0, 2**31))  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_depthwise_geometry(
    row: ConvKernel, channels: int, data: st.DataObject, activation: str, more: bool, seed: int
) -> None:
    def pair(least: int, most: int) -> tuple[int, int]:
        return data.draw(st.integers(least, most)), data.draw(st.integers(least, most))

    def often(*values: int) -> tuple[int, int]:  # rows of 3, 5 and 7 taps have loops of their own at strides 1 and 2
        return data.draw(st.sampled_from(values)), data.draw(st.sampled_from(values))

    kernel, dilation, stride = often(1, 2, 3, 3, 4, 5, 5, 6, 7), often(1, 1, 1, 2, 3), often(1, 1, 2, 2, 3)
    geometry = Geometry(channels, channels, kernel, stride, pair(0, 8), pair(0, 8), dilation, channels)
    height, width = (data.draw(st.integers(d * (k - 1) + 1, 24)) for d, k in zip(dilation, kernel, strict=True))
    x = torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(seed))
    weight, bias = sparse(geometry, seed), torch.randn(channels)
    prepared = row.prepare(weight, geometry)
    assert torch.equal(row.restore(prepared), weight)
    other = torch.randn(2, channels, *geometry.output(height, width)) if more else None
    with threads(data.draw(st.integers(1, 3))):
        plain = row.run(x, prepared, bias, ConvProblem.of(geometry))
        y = row.run(x, prepared, bias, ConvProblem.of(geometry, activation), other)
    assert_convolution(plain, x, weight, bias, geometry)
    want = ConvEpilogue(activation).apply(plain if other is None else plain + other)
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)
