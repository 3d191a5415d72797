"""Direct convolutions: any geometry against float64, their blocks and borders, and what a call must leave alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import assert_undisturbed, each_row, threads
from tests.kernels.conv_cases import assert_convolution
from tests.kernels.sweeps.operands import Guarded
from tests.turns import in_turn
from twofour import native
from twofour.errors import KernelError
from twofour.kernels.conv import ACTIVATIONS, ConvProblem, Geometry, channels_last
from twofour.kernels.dense_conv import direct_rows
from twofour.kernels.dense_conv.direct_rows import DirectConv

ROWS = direct_rows()
SAME = Geometry(37, 45, (3, 3), (1, 1), (1, 1), (1, 1))


def draw(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def weight_of(geometry: Geometry, seed: int = 1) -> Tensor:
    return draw(geometry.out_channels, geometry.in_channels // geometry.groups, *geometry.kernel, seed=seed)


@each_row(ROWS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_geometry(row: DirectConv, data: st.DataObject) -> None:
    def pair(least: int, most: int) -> tuple[int, int]:
        return data.draw(st.integers(least, most)), data.draw(st.integers(least, most))

    groups = data.draw(st.sampled_from([1, 1, 1, 2, 3]))
    channels, outputs = data.draw(st.integers(2, 40)) * groups, data.draw(st.integers(1, 40)) * groups
    kernel, dilation = pair(1, 5), pair(1, 3)
    geometry = Geometry(channels, outputs, kernel, pair(1, 4), pair(0, 6), pair(0, 6), dilation, groups)
    height, width = (data.draw(st.integers(d * (k - 1) + 1, 24)) for d, k in zip(dilation, kernel, strict=True))
    images, seed = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 2**31))
    x, weight = draw(images, channels, height, width, seed=seed), weight_of(geometry, seed)
    with threads(data.draw(st.integers(1, 3))):
        y = row.run(x, row.prepare(weight, geometry), None, ConvProblem.of(geometry))
    assert_convolution(y, x, weight, None, geometry)


@each_row(ROWS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_images_of_few_channels_are_read_as_they_come(row: DirectConv, data: st.DataObject) -> None:
    def pair(least: int, most: int) -> tuple[int, int]:
        return data.draw(st.integers(least, most)), data.draw(st.integers(least, most))

    kernel = pair(1, 7)
    sizes = data.draw(st.integers(1, 15)), data.draw(st.integers(1, 70)), kernel
    geometry = Geometry(*sizes, pair(1, 5), pair(0, 8), pair(0, 8))
    height, width = (data.draw(st.integers(k, k + 40)) for k in kernel)
    images, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2**31))
    x, weight = draw(images, geometry.in_channels, height, width, seed=seed), weight_of(geometry, seed)
    prepared, problem = row.prepare(weight, geometry), ConvProblem.of(geometry, "relu6")
    other = draw(images, geometry.out_channels, *geometry.output(height, width), seed=seed)
    assert row.image(x, geometry) is x
    with threads(data.draw(st.integers(1, 3))):
        assert_convolution(row.run(x, prepared, None, ConvProblem.of(geometry)), x, weight, None, geometry)
        y = row.run(x, prepared, None, problem, other)
        if kernel[1] > 1:  # else channels that stand together are one run
            assert torch.equal(y, row.run(channels_last(x), prepared, None, problem, other))


@each_row(ROWS)
def test_geometries_that_choose_another_path(row: DirectConv) -> None:
    for geometry, (images, height, width) in (
        (Geometry(3, 33, (7, 7), (2, 2), (3, 3), (3, 3)), (2, 19, 21)),  # by lines
        (Geometry(1, 5, (3, 5), (1, 2), (0, 9), (4, 7)), (1, 9, 3)),  # by lines, zeros wider than the image
        (Geometry(8, 4, (1, 3), (1, 128)), (1, 2, 300)),  # by lines, where single taps would be copied
        (Geometry(3, 4, (2, 3), (3, 1), (0, 0), (9, 0)), (1, 2, 40)),  # by lines, rows that read nothing
        (Geometry(3, 4, (3, 3), (1, 1), (2, 2), (2, 2), (2, 2)), (1, 9, 9)),  # few channels, taps apart
        (Geometry(1024, 3, (1, 1)), (2, 4, 5)),  # copied: pixels would share a set of the cache
        (Geometry(512, 4, (3, 3), (2, 2), (1, 1), (1, 1)), (2, 7, 6)),  # copied, several taps
        (Geometry(512, 4, (1, 1), (2, 2), (1, 0), (1, 1)), (1, 6, 7)),  # copied, pixels that nothing meets are not
        (Geometry(2048, 2, (1, 1)), (3, 1, 1)),
        (Geometry(260, 290, (1, 1)), (1, 6, 7)),  # a weight larger than what stays in L2
        (Geometry(40, 90, (1, 1)), (1, 40, 30)),  # chunks
        (Geometry(8, 4, (3, 3), (1, 1), (5, 5), (5, 5)), (1, 2, 2)),  # outputs that read zeros alone
    ):
        x, weight, bias = (
            draw(images, geometry.in_channels, height, width),
            weight_of(geometry),
            draw(geometry.out_channels),
        )
        prepared = row.prepare(weight, geometry)
        for count in (1, 3):
            with threads(count):
                y = row.run(x, prepared, bias, ConvProblem.of(geometry))
            assert_convolution(y, x, weight, bias, geometry)


@each_row(ROWS)
@in_turn("activation", ACTIVATIONS)
def test_epilogues_add_then_activate(row: DirectConv, activation: str) -> None:
    x, weight, bias = draw(3, 37, 7, 6), weight_of(SAME) / 8, draw(45, seed=2)  # some sums exceed 6
    plain = torch.conv2d(x, weight, bias, 1, 1)
    prepared, problem = row.prepare(weight, SAME), ConvProblem.of(SAME, activation)
    for other in (None, draw(3, 45, 7, 6, seed=3)):
        want = problem.epilogue.apply(plain if other is None else plain + other)
        before = torch.zeros(0) if other is None else other.clone()
        torch.testing.assert_close(row.run(x, prepared, bias, problem, other), want, atol=2e-5, rtol=2e-5)
        assert other is None or torch.equal(other, before)


@each_row(ROWS)
def test_nothing_is_written_around_the_answer_and_nothing_read_around_the_image(row: DirectConv) -> None:
    for channels, outputs, height, width in ((3, 5, 4, 7), (16, 32, 5, 5), (33, 47, 1, 9), (70, 64, 6, 2)):
        geometry = Geometry(channels, outputs, (3, 3), (1, 1), (1, 1), (1, 1))
        wide = torch.full((2 * height * width * channels + 64,), float("nan"))
        x = draw(2, channels, height, width).to(memory_format=torch.channels_last)
        room = wide[32:-32]
        orders = [room.view(2, height, width, channels).permute(0, 3, 1, 2)]
        orders += [room.view(x.shape)] if row.takes_planes(geometry) else []
        weight, out = weight_of(geometry), Guarded((2, height, width, outputs), torch.float32)
        y, prepared, axis = out.view.permute(0, 3, 1, 2), row.prepare(weight, geometry), (3, 1, 1, 1)
        for held in orders:
            held.copy_(x)
            for count in (1, 3):
                out.view.fill_(float("nan"))
                native.extension().dense_conv(row.index, held, prepared.tensor, None, None, y, 1, axis, axis, 0, count)
                assert_convolution(out.checked().permute(0, 3, 1, 2), x, weight, None, geometry)


@each_row(ROWS)
def test_what_is_not_finite_reaches_the_outputs_that_read_it(row: DirectConv) -> None:
    x, weight = draw(1, 37, 9, 19), weight_of(SAME)
    prepared = row.prepare(weight, SAME)
    clean = row.run(x, prepared, None, ConvProblem.of(SAME))
    x[0, 5, 0, 0], x[0, 7, 4, 9] = float("inf"), float("nan")
    y = row.run(x, prepared, None, ConvProblem.of(SAME))
    reached = torch.zeros(9, 19, dtype=torch.bool)
    reached[:2, :2] = reached[3:6, 8:11] = True
    assert torch.equal(y[..., ~reached], clean[..., ~reached]) and not y[..., reached].isfinite().any()
    for name in ("relu", "relu6"):
        clipped = row.run(x, prepared, None, ConvProblem.of(SAME, name))
        assert torch.equal(clipped.isnan(), ACTIVATIONS[name](y).isnan())


@each_row(ROWS)
def test_weights_come_back(row: DirectConv) -> None:
    for geometry in (SAME, Geometry(12, 50, (2, 3), groups=2), Geometry(5, 64, (1, 1))):
        weight = weight_of(geometry)
        prepared = row.prepare(nn.Parameter(weight), geometry)
        weight.zero_()
        again = prepared.restore()
        assert isinstance(again, Tensor) and torch.equal(again, weight_of(geometry))
        assert torch.equal(prepared.again(again).tensor, prepared.tensor)


@each_row(ROWS)
def test_calls_from_several_threads_do_not_disturb_each_other(row: DirectConv) -> None:
    prepared = row.prepare(weight_of(SAME), SAME)
    inputs = [draw(n, 37, 4 + n, 9) for n in (1, 2, 3)]
    want = [row.run(x, prepared, None, ConvProblem.of(SAME)) for x in inputs]
    assert_undisturbed(lambda x: row.run(x, prepared, None, ConvProblem.of(SAME)), inputs, want)


@each_row(ROWS)
def test_what_does_not_fit_is_refused(row: DirectConv) -> None:
    x, prepared = draw(1, 37, 9, 9), row.prepare(weight_of(SAME), SAME)
    with pytest.raises(KernelError, match="weight"):
        row.run(x, prepared, None, ConvProblem.of(Geometry(37, 77, (3, 3), (1, 1), (1, 1), (1, 1))))
    with pytest.raises(KernelError, match="operands of a convolution"):
        row.run(draw(1, 36, 9, 9), prepared, None, ConvProblem.of(SAME))
    assert "depthwise_conv" in (row.refuses(Geometry(8, 8, (3, 3), groups=8)) or "")
    assert "65" in (row.refuses(Geometry(8, 8, (1, 65))) or "")
    y, axis = torch.empty(1, 45, 9, 9).contiguous(memory_format=torch.channels_last), (3, 1, 1, 1)
    image = x.contiguous(memory_format=torch.channels_last)
    with pytest.raises(KernelError, match="channels_last"):  # 37 channels, one plane behind the other
        native.extension().dense_conv(row.index, x, prepared.tensor, None, None, y, 1, axis, axis, 0, 1)
    for groups, code in ((2, 0), (0, 0), (1, 6), (1, -1)):
        with pytest.raises(ValueError, match="no such"):
            native.extension().dense_conv(row.index, image, prepared.tensor, None, None, y, groups, axis, axis, code, 1)
