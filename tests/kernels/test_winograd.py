"""Winograd's convolutions: every element within the bound that their README states, also on adversarial data."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import assert_undisturbed, each_row, threads
from tests.kernels.sweeps.operands import Guarded
from tests.turns import in_turn
from twofour import native
from twofour.compiler.choose_conv import conv_candidates
from twofour.errors import KernelError
from twofour.kernels import convolutions
from twofour.kernels.conv import ConvProblem, Geometry
from twofour.kernels.dense_conv import winograd_rows
from twofour.kernels.dense_conv.winograd_rows import AMPLIFIED, WinogradConv, weight_transform
from twofour.kernels.nm_conv import nm_conv_reference

ROWS = winograd_rows()
U = 2**-24
SAME = Geometry(37, 45, (3, 3), (1, 1), (1, 1), (1, 1))
AXIS = (3, 1, 1, 1)


def draw(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def bound(row: WinogradConv, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the README's bound of each output: factor (channels + 20) u 9 sum over channels of max|x| max|w|."""
    tile = int(row.layout[-1])
    high, wide = geometry.output(*x.shape[2:])
    down, across = -(-high // tile) * tile + 2, -(-wide // tile) * tile + 2
    held = x.new_zeros(*x.shape[:2], down, across, dtype=torch.float64)
    (top, left), (rows, columns) = geometry.before, x.shape[2:]
    rows, columns = min(rows, down - top), min(columns, across - left)
    held[:, :, top : top + rows, left : left + columns] = x[:, :, :rows, :columns].abs()
    largest = torch.nn.functional.max_pool2d(held, tile + 2, tile)
    sums = 9 * torch.einsum("nchw,kc->nkhw", largest, weight.double().abs().amax((2, 3)))
    sums = sums.repeat_interleave(tile, 2).repeat_interleave(tile, 3)[:, :, :high, :wide]
    return AMPLIFIED[row.layout] * (geometry.in_channels + 20) * U * sums


def assert_within(row: WinogradConv, y: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> None:
    want = nm_conv_reference(x.double(), weight.double(), None, geometry)
    assert y.shape == want.shape and y.is_contiguous(memory_format=torch.channels_last)
    assert ((y.double() - want).abs() <= bound(row, x, weight, geometry) + 2 * U * want.abs()).all()


@each_row(ROWS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_geometry(row: WinogradConv, data: st.DataObject) -> None:
    def pair(least: int, most: int) -> tuple[int, int]:
        return data.draw(st.integers(least, most)), data.draw(st.integers(least, most))

    (channels, outputs), (height, width) = pair(1, 70), pair(1, 15)
    before, after = pair(0, 4), pair(2, 4)
    geometry = Geometry(channels, outputs, (3, 3), (1, 1), before, after)
    images, seed = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 2**31))
    x, weight = draw(images, channels, height, width, seed=seed), draw(outputs, channels, 3, 3, seed=seed)
    with threads(data.draw(st.integers(1, 3))):
        y = row.run(x, row.prepare(weight, geometry), None, ConvProblem.of(geometry))
    assert_within(row, y, x, weight, geometry)


ADVERSARIAL = {
    "numbers of all sizes": lambda x, w: (x * 10.0 ** (8 * draw(*x.shape, seed=3)).clamp(-15, 15), w),
    "a pixel of 1e8 in each tile": lambda x, w: (x.index_fill(2, torch.tensor([2]), 1e8), w),
    "sums that cancel": lambda x, w: (torch.ones_like(x), w - w.mean((1, 2, 3), keepdim=True)),
    "signs that the transforms add up": lambda x, w: ((x * 1e6).sign() * 3.0, w.sign() * 1e-3),
    "close to the largest float": lambda x, w: (x.clamp(-3, 3) * 1e35, w * 1e-3),
    "close to the smallest float": lambda x, w: (x * 1e-18, w * 1e-18),
}


@each_row(ROWS)
@in_turn("kind", ADVERSARIAL)
def test_the_bound_holds_on_adversarial_data(row: WinogradConv, kind: str) -> None:
    x, weight = ADVERSARIAL[kind](draw(2, 37, 11, 14), draw(45, 37, 3, 3, seed=1))
    y = row.run(x, row.prepare(weight, SAME), None, ConvProblem.of(SAME))
    want = nm_conv_reference(x.double(), weight.double(), None, SAME)
    tiny = torch.finfo(torch.float32).tiny * 37 * 100  # below the normal numbers an error is absolute
    assert ((y.double() - want).abs() <= bound(row, x, weight, SAME) + 2 * U * want.abs() + tiny).all()


@each_row(ROWS)
def test_whole_numbers_are_exact_with_tiles_of_two(row: WinogradConv) -> None:
    if row.layout == "winograd2":
        x, weight = (draw(2, 37, 9, 9) * 3).round(), (draw(45, 37, 3, 3) * 3).round()
        y = row.run(x, row.prepare(weight, SAME), None, ConvProblem.of(SAME))
        assert torch.equal(y, torch.conv2d(x, weight, None, 1, 1))


@each_row(ROWS)
@in_turn("activation", ["none", "relu", "relu6", "gelu"])
def test_epilogues_add_then_activate(row: WinogradConv, activation: str) -> None:
    x, weight, bias = draw(3, 37, 7, 6), draw(45, 37, 3, 3, seed=1) / 8, draw(45, seed=2)
    plain = torch.conv2d(x, weight, bias, 1, 1)
    apply = {"none": nn.Identity(), "relu": nn.ReLU(), "relu6": nn.ReLU6(), "gelu": nn.GELU()}[activation]
    prepared, problem = row.prepare(weight, SAME), ConvProblem.of(SAME, activation)
    for other in (None, draw(3, 45, 7, 6, seed=3)):
        want = apply(plain if other is None else plain + other)
        before = torch.zeros(0) if other is None else other.clone()
        torch.testing.assert_close(row.run(x, prepared, bias, problem, other), want, atol=2e-5, rtol=2e-5)
        assert other is None or torch.equal(other, before)


@each_row(ROWS)
def test_nothing_is_written_around_the_answer_and_nothing_read_around_the_image(row: WinogradConv) -> None:
    for channels, outputs, height, width in ((3, 5, 4, 7), (16, 32, 5, 5), (33, 47, 1, 9), (70, 64, 6, 2)):
        geometry = Geometry(channels, outputs, (3, 3), (1, 1), (1, 1), (1, 1))
        wide = torch.full((2 * height * width * channels + 64,), float("nan"))
        x = draw(2, channels, height, width).to(memory_format=torch.channels_last)
        held = wide[32:-32].view(2, height, width, channels).permute(0, 3, 1, 2).copy_(x)
        weight = draw(outputs, channels, 3, 3, seed=1)
        out = Guarded((2, height, width, outputs), torch.float32)
        y, prepared = out.view.permute(0, 3, 1, 2), row.prepare(weight, geometry)
        for count in (1, 3):
            out.view.fill_(float("nan"))
            native.extension().dense_conv(row.index, held, prepared.tensor, None, None, y, 1, AXIS, AXIS, 0, count)
            assert_within(row, out.checked().permute(0, 3, 1, 2), x, weight, geometry)


@each_row(ROWS)
def test_what_is_not_finite_stays_in_the_tiles_that_read_it(row: WinogradConv) -> None:
    tile = int(row.layout[-1])
    x, weight = draw(1, 37, 19, 19), draw(45, 37, 3, 3)
    prepared = row.prepare(weight, SAME)
    clean = row.run(x, prepared, None, ConvProblem.of(SAME))
    x[0, 5, 0, 0], x[0, 7, 0, 0] = float("inf"), float("nan")
    y = row.run(x, prepared, None, ConvProblem.of(SAME))
    assert torch.equal(y[..., tile:, :], clean[..., tile:, :]) and torch.equal(y[..., tile:], clean[..., tile:])
    assert not y[..., :2, :2].isfinite().any()
    relu = row.run(x, prepared, None, ConvProblem.of(SAME, "relu"))
    assert torch.equal(relu.isnan(), torch.relu(y).isnan())


@each_row(ROWS)
def test_weights_are_transformed_and_come_back(row: WinogradConv) -> None:
    weight = draw(45, 37, 3, 3)
    prepared, transform = row.prepare(nn.Parameter(weight), SAME), weight_transform(row.layout)
    want = torch.einsum("ij,kcjl,ml->imkc", transform, weight.double(), transform).float()
    places = want.shape[0] ** 2
    held = prepared.tensor[: 64 * places * 37].view(2, places, 37, 32).permute(1, 0, 3, 2).reshape(places, 64, 37)
    torch.testing.assert_close(held[:, :45], want.reshape(places, 45, 37), rtol=2 * U, atol=0)
    assert not held[:, 45:].any()
    again = prepared.restore()
    weight.zero_()
    assert isinstance(again, Tensor)
    assert torch.equal(again, draw(45, 37, 3, 3)) and torch.equal(prepared.again(again).tensor, prepared.tensor)


@each_row(ROWS)
def test_calls_from_several_threads_do_not_disturb_each_other(row: WinogradConv) -> None:
    prepared = row.prepare(draw(45, 37, 3, 3), SAME)
    inputs = [draw(n, 37, 4 + n, 9) for n in (1, 2, 3)]
    want = [row.run(x, prepared, None, ConvProblem.of(SAME)) for x in inputs]
    assert_undisturbed(lambda x: row.run(x, prepared, None, ConvProblem.of(SAME)), inputs, want)


@each_row(ROWS)
def test_what_does_not_fit_is_refused(row: WinogradConv) -> None:
    x, prepared = draw(1, 37, 9, 9), row.prepare(draw(45, 37, 3, 3), SAME)
    wider = Geometry(37, 77, (3, 3), (1, 1), (1, 1), (1, 1))
    with pytest.raises(KernelError, match="weight"):
        row.run(x, prepared, None, ConvProblem.of(wider))
    with pytest.raises(KernelError, match="operands of a convolution"):
        row.run(draw(1, 36, 9, 9), prepared, None, ConvProblem.of(SAME))
    for other in (
        Geometry(4, 4, (1, 1)),
        Geometry(4, 4, (3, 3), (2, 2)),
        Geometry(4, 4, (3, 3), dilation=(2, 1)),
        Geometry(4, 4, (3, 3), groups=2),
    ):
        assert "3x3" in (row.refuses(other) or "")


def test_close_rows_are_candidates_only_where_they_are_asked_for() -> None:
    weight = draw(45, 37, 3, 3)
    assert {row.close for row in convolutions()} == {True, False}
    without, because = conv_candidates(weight, SAME, None, "no pattern was found")
    close, same = conv_candidates(weight, SAME, None, "no pattern was found", close=True)
    assert not any(row.close for row in without) and because == same
    assert {row.layout for row in close if row.close} == {"winograd2", "winograd4"} and close[: len(without)] == without
    assert len({row.isa for row in close if row.close}) == 1
    assert all("Winograd F(" in row.remark(64 * 9) for row in close if row.close)
