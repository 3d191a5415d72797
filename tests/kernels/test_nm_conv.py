"""Every convolution row against float64, at odd sizes, with poisoned outputs (conftest fills torch.empty)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import OF_FLOATS, assert_undisturbed, each_row, threads
from tests.turns import in_turn
from twofour import native
from twofour.errors import KernelError, PackingError
from twofour.kernels import convolutions, find
from twofour.kernels.conv import ACTIVATIONS, ConvEpilogue, ConvKernel, ConvProblem, Geometry
from twofour.kernels.dense_conv import ONEDNN_CONV, PLAIN_CONV
from twofour.kernels.fold import fold_batch_norm
from twofour.kernels.nm_conv import from_conv_layout, nm_conv_reference, to_conv_layout
from twofour.kernels.nm_conv.layout import from_rows, to_rows, to_turned_rows
from twofour.kernels.quantization import Quantization
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


@given(channels=st.integers(1, 50), out=st.integers(1, 9), height=st.integers(1, 5), width=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_weights_come_back(channels: int, out: int, height: int, width: int) -> None:
    geometry = Geometry(8 * channels, 2 * out, (height, width), groups=2)
    weight = sparse(geometry)
    assert torch.equal(from_rows(to_rows(weight), 4 * channels, height, width), weight)
    for form in (torch.contiguous_format, torch.channels_last):
        turned = to_rows(weight.transpose(0, 1).flip(2, 3))
        assert torch.equal(to_turned_rows(weight.contiguous(memory_format=form)), turned)
    assert torch.equal(from_conv_layout(to_conv_layout(weight, geometry), geometry).unpack(), weight)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(8, 4, 3, 2, 1, dilation=2),
        nn.Conv2d(8, 4, (4, 3), padding="same", dilation=(1, 3)),
        nn.Conv2d(8, 4, 5, padding="valid"),
        nn.Conv1d(8, 6, 3, 2, 4, groups=2),
        nn.Conv1d(8, 4, 4, padding="same"),
    ],
    ids=lambda module: module.extra_repr(),
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_geometry_of_torch_layers(module: nn.Conv1d | nn.Conv2d) -> None:
    geometry = Geometry.of(module)
    x = torch.randn(2, 8, 11, 14) if isinstance(module, nn.Conv2d) else torch.randn(2, 8, 14)
    image = x if x.ndim == 4 else x.unsqueeze(2)
    weight = module.weight if x.ndim == 4 else module.weight.unsqueeze(2)
    found = nm_conv_reference(image, weight, module.bias, geometry)
    torch.testing.assert_close(found.view(module(x).shape), module(x))
    assert geometry.output(*image.shape[2:]) == found.shape[2:]


def test_batch_norm_folds_and_zeros_stay() -> None:
    conv, norm = nn.Conv2d(8, 6, 3, bias=False), nn.BatchNorm2d(6).eval()
    conv.weight.data = sparse(Geometry(8, 6, (3, 3)))
    norm.running_mean, norm.running_var = torch.randn(6), torch.rand(6) + 0.5
    norm.weight.data, norm.bias.data = torch.randn(6), torch.randn(6)
    x = torch.randn(2, 8, 7, 7)
    for bias in (None, torch.randn(6)):
        weight, shift = fold_batch_norm(conv.weight, bias, norm)
        want = norm(torch.conv2d(x, conv.weight, bias))
        torch.testing.assert_close(torch.conv2d(x, weight, shift), want, atol=1e-5, rtol=1e-5)
        assert torch.equal(weight == 0, conv.weight == 0)
    with pytest.raises(KernelError, match="cannot be folded"):
        fold_batch_norm(conv.weight, None, nn.BatchNorm2d(6, track_running_stats=False))


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


@each_row(ROWS)
def test_a_prepared_weight_is_not_the_callers_own(row: ConvKernel) -> None:
    geometry = Geometry(16, 8, (1, 1))
    weight = torch.randn(8, 16, 1, 1)  # dense in both orders: nothing has to move
    weight *= parse("2:4").project(weight.movedim(1, -1), absolute=True).movedim(-1, 1)
    prepared, want = row.prepare(nn.Parameter(weight), geometry, (1, 4, 4)), weight.clone()
    weight.zero_()
    found = prepared.restore()
    assert torch.equal(found.unpack() if isinstance(found, Packed) else found, want)


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


RANGES = {
    "dynamic": Quantization(),
    "static": Quantization(0.02, 117),
    "bytes": Quantization(0.02, 117, torch.uint8, 0.05, 20),
    "signed bytes": Quantization(0.03, 0, torch.int8, 0.07, -9),
    "halves": Quantization(0.02, 117, torch.bfloat16),
}


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
