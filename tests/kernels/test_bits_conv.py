"""Convolutions of codes of 1 to 8 bits: bit for bit those of whole numbers, answers in the next layer's codes too."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import each_row, threads
from tests.kernels.bits_cases import EVERY, generator
from tests.turns import in_turn
from twofour import native
from twofour.errors import KernelError
from twofour.kernels.bits_matmul import TERNARY, BitWeight, Levels, bipolar, twos, unsigned
from twofour.kernels.bits_matmul.conv import (
    AfterConv,
    BitsConv,
    BitsConvProblem,
    CodedImages,
    Requantised,
    bits_conv_reference,
    bits_conv_rows,
    requantise,
    whole_convolution,
)
from twofour.kernels.bits_matmul.conv.rows import LOOKUPS
from twofour.kernels.conv import Geometry
from twofour.kernels.quantization import LEVELS, Quantization

GEOMETRIES = (
    (Geometry(5, 7, (3, 3), (1, 1), (1, 1), (1, 1)), (2, 6, 5)),
    (Geometry(70, 35, (3, 3), (2, 2), (1, 1), (1, 1)), (1, 7, 8)),
    (Geometry(64, 66, (1, 1)), (2, 3, 5)),
    (Geometry(3, 33, (5, 2), (2, 1), (2, 0), (1, 1), (1, 2)), (1, 4, 9)),
    (Geometry(130, 4, (1, 1), (2, 2), (0, 0), (0, 0)), (1, 5, 5)),
    (Geometry(6, 5, (3, 3), (1, 1), (3, 4), (3, 4)), (1, 2, 1)),  # windows of zeros alone
    (Geometry(9, 34, (1, 1), (2, 3), (2, 0), (1, 4)), (2, 6, 8)),  # pixels that no window reads
)


@cache
def weight_of(levels: Levels, geometry: Geometry, scale: float | None = None) -> BitWeight:
    most, out = 2 if levels == TERNARY else levels.most, geometry.out_channels
    codes = torch.randint(0, most + 1, (out, geometry.columns), generator=generator(most), dtype=torch.uint8)
    scales = torch.rand(out, generator=generator(out)) + 0.5 if scale is None else torch.full((out,), scale)
    return BitWeight(codes, levels, scales)


def image_of(geometry: Geometry, size: tuple[int, int, int], seed: int = 0) -> Tensor:
    count, height, width = size
    return torch.randn(count, geometry.in_channels, height, width, generator=generator(seed)) + 0.3


def refused(
    row: BitsConv, geometry: Geometry, levels: Levels, quantization: Quantization, size: tuple[int, int, int]
) -> bool:
    """Tell whether a row refuses: the one of lookups sums of more than four bits, and nothing else here."""
    reason = row.refuses(geometry, levels, quantization, size)
    of_bits = row.layout == LOOKUPS and quantization.bits > 4
    assert (reason is not None) is of_bits and (not of_bits or "codes of at most 4 bits" in str(reason))
    return of_bits


def coded_of(row: BitsConv, codes: Tensor, bits: int) -> tuple[Tensor, CodedImages]:
    images = CodedImages(row.planes, codes.shape[1], bits, *codes.shape[2:])
    return images.pack(codes), images


@each_row(bits_conv_rows())
def test_codes_give_the_whole_sums_for_every_pair_of_widths_and_system(row: BitsConv) -> None:
    geometry, size = GEOMETRIES[0]
    pairs = itertools.product(EVERY, range(1, 9), LEVELS)
    for levels, bits, system in pairs:
        quantization = Quantization(1.0, (1 << bits) // 3 if system == "unsigned" else 0, bits=bits, levels=system)
        if refused(row, geometry, levels, quantization, size):
            continue
        codes = torch.randint(0, 1 << bits, (1, 5, *size[1:]), generator=generator(bits), dtype=torch.uint8)
        x, images = coded_of(row, codes, bits)
        weight = weight_of(levels, geometry, 1.0)
        y = row.run(x, row.prepare(weight, geometry), None, BitsConvProblem(geometry, quantization, coded=images))
        want, _ = whole_convolution(codes, weight, geometry, quantization)
        assert torch.equal(y.long(), want), (levels, quantization)


@each_row(bits_conv_rows())
@pytest.mark.parametrize(("geometry", "size"), GEOMETRIES)
def test_real_images_are_rounded_and_padded_as_the_reference_does(
    row: BitsConv, geometry: Geometry, size: tuple[int, int, int]
) -> None:
    bias, x = torch.randn(geometry.out_channels, generator=generator(1)), image_of(geometry, size)
    for levels, bits in ((bipolar(1), 1), (twos(2), 2), (TERNARY, 8), (unsigned(4), 3), (twos(8), 8), (bipolar(8), 4)):
        weight = weight_of(levels, geometry)
        prepared = row.prepare(weight, geometry)
        for system, scale, count in zip(LEVELS, (None, 0.25, None), (1, 3, 2), strict=True):
            quantization = Quantization(scale, bits=bits, levels=system)
            if refused(row, geometry, levels, quantization, size):
                continue
            with threads(count):
                y = row.run(x, prepared, bias, BitsConvProblem(geometry, quantization))
            assert y.is_contiguous(memory_format=torch.channels_last)
            want = bits_conv_reference(x, weight, bias, geometry, quantization)
            assert torch.equal(y, want), (levels, quantization)


@each_row(bits_conv_rows())
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_odd_shapes(row: BitsConv, data: st.DataObject) -> None:
    sizes = st.integers(1, 3)
    pair = st.tuples(sizes, sizes)
    kernel, stride, dilation = data.draw(pair), data.draw(pair), data.draw(pair)
    before, after = (data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in range(2))
    channels, outputs = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    geometry = Geometry(channels, outputs, kernel, stride, before, after, dilation)
    reach = [dilation[i] * (kernel[i] - 1) + 1 for i in range(2)]
    size = (
        data.draw(st.integers(1, 2)),
        reach[0] + data.draw(st.integers(0, 6)),
        reach[1] + data.draw(st.integers(0, 6)),
    )
    levels, bits = data.draw(st.sampled_from(EVERY)), data.draw(st.integers(1, 8))
    quantization = Quantization(data.draw(st.sampled_from((None, 0.3))), bits=bits)
    if refused(row, geometry, levels, quantization, size):
        return
    weight, x = weight_of(levels, geometry), image_of(geometry, size)
    y = row.run(x, row.prepare(weight, geometry), None, BitsConvProblem(geometry, quantization))
    assert torch.equal(y, bits_conv_reference(x, weight, None, geometry, quantization))


def thresholds_of(out: int, bits: int, planes: bool, pool: int) -> Requantised:
    levels = torch.randint(-40, 40, ((1 << bits) - 1, out), generator=generator(out), dtype=torch.int32).sort(0).values
    flips = -torch.randint(0, 2, (out,), generator=generator(bits), dtype=torch.int32)
    levels[:, 0] = torch.iinfo(torch.int32).min  # a channel that is always at its greatest level
    return Requantised(flips, levels, planes, pool)


@each_row(bits_conv_rows())
def test_answers_of_codes_are_those_of_thresholds_pooled_and_feed_the_next_convolution(row: BitsConv) -> None:
    for (geometry, size), bits, pool in itertools.product((*GEOMETRIES[:5], GEOMETRIES[6]), (1, 2, 3, 4), (1, 2)):
        quantization, weight = Quantization(0.25, bits=2), weight_of(twos(2), geometry)
        answer = thresholds_of(geometry.out_channels, bits, bits % 2 == 1, pool)
        x, prepared = image_of(geometry, size), row.prepare(weight, geometry)
        with threads(bits):
            y = row.run(x, prepared, None, BitsConvProblem(geometry, quantization, answer))
        want = requantise(whole_convolution(x, weight, geometry, quantization)[0], answer)
        images = answer.images(*geometry.output(*size[1:]))
        assert torch.equal(y, images.pack(want)), (geometry, bits, pool)
        assert torch.equal(images.unpack(y), want)
        if images.height < 1 or images.width < 1 or row.planes is not answer.planes:
            continue
        for reach in (((3, 3), (1, 1), (1, 1), (1, 1)), ((1, 1), (3, 2), (1, 0), (1, 1))):
            second = Geometry(geometry.out_channels, 9, *reach)
            other, steps = weight_of(bipolar(1), second), Quantization(0.5, bits=bits)
            found = row.run(y, row.prepare(other, second), None, BitsConvProblem(second, steps, coded=images))
            assert torch.equal(found, bits_conv_reference(want, other, None, second, steps))


@each_row([row for row in bits_conv_rows() if row.layout == LOOKUPS])
@pytest.mark.parametrize("levels", [bipolar(1), twos(2), TERNARY, unsigned(3), twos(8)])
def test_sums_are_exact_over_many_inputs_rows_and_panels(row: BitsConv, levels: Levels) -> None:
    geometry, size = (
        Geometry(160, 130, (3, 3), (1, 1), (1, 1), (1, 1)),
        (1, 19, 40),
    )  # segments of inputs, chunks of rows
    weight, x = weight_of(levels, geometry), image_of(geometry, size)
    for bits, zero in ((1, 0), (2, 1), (4, 0)):
        quantization = Quantization(0.05, zero, bits=bits)  # nearly all codes are the greatest one
        prepared, answer = row.prepare(weight, geometry), thresholds_of(geometry.out_channels, 2, False, 2)
        y = row.run(x.abs(), prepared, None, BitsConvProblem(geometry, quantization))
        assert torch.equal(y, bits_conv_reference(x.abs(), weight, None, geometry, quantization))
        codes = row.run(x.abs(), prepared, None, BitsConvProblem(geometry, quantization, answer))
        want = requantise(whole_convolution(x.abs(), weight, geometry, quantization)[0], answer)
        assert torch.equal(codes, answer.images(*size[1:]).pack(want))


@each_row([row for row in bits_conv_rows() if row.layout == LOOKUPS])
@pytest.mark.parametrize("levels", [bipolar(1), twos(2), TERNARY, unsigned(3), bipolar(3), twos(4), Levels(3, 1, -2)])
def test_sums_that_16_bits_do_not_hold_are_exact(row: BitsConv, levels: Levels) -> None:
    geometry = Geometry(600, 66, (3, 3))
    quantization, codes = Quantization(0.5, bits=4), torch.full((1, 600, 4, 5), 15, dtype=torch.uint8)
    codes[0, ::7, 1] = 0
    x, images = coded_of(row, codes, 4)
    largest, mixed = torch.full((33, geometry.columns), levels.largest_code), weight_of(levels, geometry).codes[:33]
    weight = BitWeight(torch.cat([largest, mixed]).to(torch.uint8), levels, torch.rand(66, generator=generator(0)))
    prepared, answer = row.prepare(weight, geometry), thresholds_of(66, 2, False, 1)
    assert torch.equal(row.restore(prepared, geometry).codes, weight.codes)
    y = row.run(x, prepared, None, BitsConvProblem(geometry, quantization, coded=images))
    assert torch.equal(y, bits_conv_reference(codes, weight, None, geometry, quantization))
    found = row.run(x, prepared, None, BitsConvProblem(geometry, quantization, answer, images))
    assert torch.equal(
        found, answer.images(2, 3).pack(requantise(whole_convolution(codes, weight, geometry, quantization)[0], answer))
    )


@each_row(bits_conv_rows())
def test_windows_that_read_nan_are_nan_alone(row: BitsConv) -> None:
    geometry, size = GEOMETRIES[0]
    weight = weight_of(twos(2), geometry)
    prepared, x = row.prepare(weight, geometry), image_of(geometry, size)
    x[1, 3, 2, 2] = float("nan")
    static = Quantization(0.25, bits=2)
    want = bits_conv_reference(x, weight, None, geometry, static)
    y = row.run(x, prepared, None, BitsConvProblem(geometry, static))
    assert want[1].isnan().any() and want[1].isfinite().any() and want[0].isfinite().all()
    assert torch.equal(y.nan_to_num(9.0), want.nan_to_num(9.0))
    for bad in (float("nan"), float("inf")):
        x[1, 3, 2, 2] = bad
        found = row.run(x, prepared, None, BitsConvProblem(geometry, Quantization(bits=2)))
        assert found[1].isnan().all() and found[0].isfinite().all()
    x[1, 3, 2, 2] = float("nan")
    codes = row.run(x, prepared, None, BitsConvProblem(geometry, static, thresholds_of(7, 2, row.planes, 1)))
    assert codes[:, 0].tolist() == [0, 1]


@each_row(bits_conv_rows())
def test_nan_that_no_window_reads_is_lost_on_nobody_but_a_range_of_all_of_the_image(row: BitsConv) -> None:
    geometry, size = Geometry(5, 7, (1, 2), (2, 3)), (1, 5, 8)
    weight, x = weight_of(twos(2), geometry), image_of(geometry, size)
    prepared, static = row.prepare(weight, geometry), Quantization(0.25, bits=2)
    want = bits_conv_reference(x, weight, None, geometry, static)
    x[0, 1, 1, 0] = x[0, 2, 2, 2] = float("nan")
    assert torch.equal(row.run(x, prepared, None, BitsConvProblem(geometry, static)), want)
    assert row.run(x, prepared, None, BitsConvProblem(geometry, Quantization(bits=2))).isnan().all()


@each_row(bits_conv_rows())
@in_turn("pool", [1, 2])
def test_codes_that_follow_from_nan_are_nan_in_the_next_convolution_and_no_others(row: BitsConv, pool: int) -> None:
    geometry, second, static = (
        Geometry(5, 7, (3, 2), (1, 2)),
        Geometry(7, 4, (2, 2), before=(1, 0)),
        Quantization(0.25, bits=2),
    )
    x = image_of(geometry, (2, 9, 13))
    x[1, 3, 4, 8] = float("nan")
    weight, other = weight_of(twos(2), geometry), row.prepare(weight_of(twos(2), second), second)
    answer = thresholds_of(7, 2, row.planes, pool)
    size = geometry.output(9, 13)
    images, found = answer.images(*size), []
    for image in (x, x.nan_to_num(0.0)):  # codes of finite pixels are the same
        codes = row.run(image, row.prepare(weight, geometry), None, BitsConvProblem(geometry, static, answer))
        found.append(row.run(codes, other, None, BitsConvProblem(second, static, coded=images)))
    real = row.run(x, row.prepare(weight, geometry), None, BitsConvProblem(geometry, static))
    lost = nn.functional.max_pool2d(real.isnan().any(1, keepdim=True).float(), pool)
    lost = nn.functional.conv2d(nn.functional.pad(lost, (0, 0, 1, 0)), torch.ones(1, 1, 2, 2)) > 0
    assert lost[1].any() and not lost[1].all() and not lost[0].any()
    assert torch.equal(found[0].nan_to_num(99.0), found[1].masked_fill(lost, 99.0))


@each_row(bits_conv_rows())
def test_what_no_call_may_be_is_refused(row: BitsConv) -> None:
    geometry, size = GEOMETRIES[0]
    weight, x = weight_of(twos(2), geometry), image_of(geometry, size)
    prepared, two = row.prepare(weight, geometry), Quantization(0.5, bits=2)
    assert "groups" in str(row.refuses(Geometry(4, 4, (1, 1), groups=2), twos(2), two, size))
    assert "80) has more than 64 taps" in str(row.refuses(Geometry(4, 4, (1, 80)), twos(2), two, (1, 1, 90)))
    assert "2 GB" in str(row.refuses(geometry, twos(2), two, (1, 1 << 16, 1 << 16)))
    wide = Geometry(70_000, 1, (1, 1))
    assert (
        "int32" in str(row.refuses(wide, twos(8), Quantization(bits=8), size))
        and row.refuses(geometry, twos(8), two, size) is None
    )
    with pytest.raises(KernelError, match="made for another"):
        row.run(
            x, row.prepare(weight_of(twos(2), GEOMETRIES[2][0]), GEOMETRIES[2][0]), None, BitsConvProblem(geometry, two)
        )
    with pytest.raises(KernelError, match="64 bytes, those of their pixels"):
        row.run(
            torch.zeros(1, 100, dtype=torch.uint8),
            prepared,
            None,
            BitsConvProblem(geometry, two, coded=CodedImages(row.planes, 5, 2, 6, 5)),
        )
    with pytest.raises(KernelError, match="static range"):
        row.run(x, prepared, None, BitsConvProblem(geometry, Quantization(bits=2), thresholds_of(7, 2, row.planes, 1)))
    of_others = thresholds_of(9, 2, row.planes, 1)  # of 7 outputs, which are padded to as many
    with pytest.raises(KernelError, match=r"codes of another convolution(.|\n)*thresholds of 9 outputs"):
        row.run(x, prepared, None, BitsConvProblem(geometry, two, of_others))
    for images in (CodedImages(row.planes, 6, 2, 6, 5), CodedImages(row.planes, 5, 3, 6, 5)):
        with pytest.raises(KernelError, match=r"codes of another convolution(.|\n)*wanted  5 channels of 2 bits"):
            codes = torch.zeros(1, images.image_bytes, dtype=torch.uint8)
            row.run(codes, prepared, None, BitsConvProblem(geometry, two, coded=images))
    if row.layout == LOOKUPS:
        with pytest.raises(KernelError, match="codes of at most 15"):
            row.run(x, prepared, None, BitsConvProblem(geometry, Quantization(0.5, bits=8)))
        wide = Geometry(96, 1, (3, 3))
        assert "2 GB" in str(row.refuses(wide, twos(2), two, (1, 3, 1 << 20)))
        assert row.refuses(wide, twos(2), two, (1, 3, 1 << 18)) is None
    if not row.planes:
        codes, images = coded_of(row, torch.full((1, 5, 6, 5), 4, dtype=torch.uint8), 2)
        with pytest.raises(KernelError, match="codes from 0 to 3"):
            row.run(codes, prepared, None, BitsConvProblem(geometry, two, coded=images))
    axes, codes = ((3, 1, 1, 1), (3, 1, 1, 1)), CodedImages(row.planes, 7, 2, 2, 0)
    numbers, y = torch.zeros(4 * 4 * row.panel, dtype=torch.uint8), torch.zeros(2, codes.image_bytes, dtype=torch.uint8)
    for empty in ((4, 0), (0, 4)):
        with pytest.raises(ValueError, match="no such convolution"):
            native.extension().bits_conv(
                row.index, x.contiguous(memory_format=torch.channels_last), prepared.tensor,
                None, numbers, None, None, y, 5, 7,
                *axes, size[1:], empty, (row.planes, 3, 2), False, 0.5, 0, 3, 1, False, False, 1,
            )  # fmt: skip
    prepared.tensor[64] = 9
    with pytest.raises(KernelError, match="as many bytes"):
        row.run(x, prepared, None, BitsConvProblem(geometry, two))


def test_thresholds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(KernelError, match="1, 3, 7 or 15"):
        Requantised(torch.zeros(3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32), True)
    with pytest.raises(KernelError, match="thresholds"):
        Requantised(torch.zeros(3, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32), True)


@each_row(bits_conv_rows())
def test_a_bias_of_any_strides_is_added_as_it_stands(row: BitsConv) -> None:
    geometry, size = GEOMETRIES[0]
    weight, x, two = weight_of(twos(2), geometry), image_of(geometry, size), Quantization(0.5, bits=2)
    bias = torch.randn(14)[::2]
    y = row.run(x, row.prepare(weight, geometry), bias, BitsConvProblem(geometry, two))
    assert torch.equal(y, bits_conv_reference(x, weight, bias, geometry, two))


@each_row(bits_conv_rows())
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_normalisation_sum_and_relu_of_a_real_answer_are_those_of_torch(
    row: BitsConv, normed: bool, added: bool
) -> None:
    for (geometry, size), count in zip(GEOMETRIES, (1, 2, 1, 3, 1, 1, 2), strict=True):
        out, weight, two = geometry.out_channels, weight_of(twos(2), geometry), Quantization(0.25, bits=2)
        x, bias = image_of(geometry, size), torch.randn(out, generator=generator(1))
        x[0, 0, 0, 0] = float("nan")
        affine = torch.randn(2, out, generator=generator(2)) if normed else None
        want = bits_conv_reference(x, weight, bias, geometry, two)
        other = torch.randn(want.shape, generator=generator(3)) if added else None
        if affine is not None:
            wide = affine.double().view(2, 1, -1, 1, 1)
            want = (want.double() * wide[0] + wide[1]).float()  # exact but for the last rounding
        want = (want if other is None else want + other).relu()
        problem = BitsConvProblem(geometry, two, after=AfterConv(affine, relu=True))
        with threads(count):
            y = row.run(x, row.prepare(weight, geometry), bias, problem, other)
        assert torch.equal(y.nan_to_num(9.0), want.nan_to_num(9.0)) and y.isnan().any()


def mean_of(pooled: Tensor) -> Tensor:
    """Return the mean over pixels: channels behind the last 64 one after the other, as torch adds otherwise there."""
    if pooled.shape[1] % 64 == 0:
        return nn.functional.adaptive_avg_pool2d(pooled, 1)
    first, *others = pooled.flatten(2).unbind(2)
    return (sum(others, first) / (len(others) + 1))[..., None, None]


@each_row(bits_conv_rows())
@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize(
    ("out", "size", "count"),
    [(64, (2, 7, 7), 1), (64, (3, 4, 5), 2), (64, (1, 33, 39), 3), (64, (1, 2, 2), 1), (70, (2, 3, 5), 1)],
)
def test_means_of_an_answer_and_of_the_greatest_of_it_are_those_of_torch(
    row: BitsConv, pool: int, out: int, size: tuple[int, int, int], count: int
) -> None:
    geometry, quantization = Geometry(5, out, (3, 3), (1, 1), (1, 1), (1, 1)), Quantization(0.25, bits=2)
    x, prepared = image_of(geometry, size), row.prepare(weight_of(twos(2), geometry), geometry)
    bias, affine = torch.randn(out, generator=generator(2)), torch.randn(2, out, generator=generator(1))
    other = torch.randn(size[0], out, *size[1:], generator=generator(3))
    x[-1, 0, 1, 1] = float("nan")
    after = AfterConv(affine if out == 64 else None, relu=True)
    real = row.run(x, prepared, bias, BitsConvProblem(geometry, quantization, after=after), other)
    with threads(count):
        problem = BitsConvProblem(geometry, quantization, after=replace(after, pool=pool))
        y = row.run(x, prepared, bias, problem, other)
    want = mean_of(nn.functional.max_pool2d(real, pool) if pool == 2 else real)
    assert y.shape == (size[0], out, 1, 1) and y[-1].isnan().any()
    assert torch.equal(y.nan_to_num(9.0), want.nan_to_num(9.0))


@each_row(bits_conv_rows())
def test_means_of_no_pixels_are_refused(row: BitsConv) -> None:
    geometry = Geometry(5, 7, (3, 3))
    problem = BitsConvProblem(geometry, Quantization(0.25, bits=2), after=AfterConv(pool=2))
    with pytest.raises(KernelError, match="means of pixels, or of 2 x 2 of them"):
        row.run(image_of(geometry, (1, 3, 4)), row.prepare(weight_of(twos(2), geometry), geometry), None, problem)
