"""Inputs of convolutions of codes: few channels, whose windows rows of bytes gather, and codes that are too great."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import each_row, threads
from tests.kernels.bits_cases import generator
from tests.kernels.test_bits_conv import coded_of, image_of, refused, thresholds_of, weight_of
from twofour.errors import KernelError
from twofour.kernels.bits_matmul import TERNARY, bipolar, twos, unsigned
from twofour.kernels.bits_matmul.conv import (
    BitsConv,
    BitsConvProblem,
    bits_conv_reference,
    bits_conv_rows,
    requantise,
    whole_convolution,
)
from twofour.kernels.conv import Geometry
from twofour.kernels.quantization import Quantization


@each_row(bits_conv_rows())
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_images_of_few_channels_whose_windows_rows_of_bytes_gather(row: BitsConv, data: st.DataObject) -> None:
    taps, strides, zeros = (st.tuples(size, size) for size in (st.integers(1, 4), st.integers(1, 2), st.integers(0, 2)))
    kernel, dilation, stride, border = (data.draw(axes) for axes in (taps, taps, strides, zeros))
    channels = data.draw(st.integers(1, 3))
    geometry = Geometry(
        channels, data.draw(st.sampled_from((1, 64, 70, 192))), kernel, stride, border, border, dilation
    )
    reach = [dilation[i] * (kernel[i] - 1) + 1 for i in range(2)]
    size = 2, reach[0] + data.draw(st.integers(0, 5)), reach[1] + data.draw(st.integers(0, 70))
    levels, bits = data.draw(st.sampled_from((twos(8), bipolar(8), unsigned(8), TERNARY))), data.draw(st.integers(1, 8))
    quantization = Quantization(0.02, (1 << bits) // 3, bits=bits)
    if refused(row, geometry, levels, quantization, size):
        return
    weight, x, count = weight_of(levels, geometry), image_of(geometry, size), data.draw(st.integers(1, 3))
    x[1, 0, 0, 0] = float("nan")
    prepared, want = row.prepare(weight, geometry), bits_conv_reference(x, weight, None, geometry, quantization)
    assert torch.equal(row.restore(prepared, geometry).codes, weight.codes)
    with threads(count):
        y = row.run(x, prepared, None, BitsConvProblem(geometry, quantization))
    assert torch.equal(y.nan_to_num(9.0), want.nan_to_num(9.0)) and y[0].isfinite().all()
    answer = thresholds_of(geometry.out_channels, data.draw(st.integers(1, 4)), data.draw(st.booleans()), 1)
    codes = torch.randint(0, 1 << bits, x.shape, generator=generator(bits), dtype=torch.uint8)
    x, images = coded_of(row, codes, bits)
    with threads(count):
        found = row.run(x, prepared, None, BitsConvProblem(geometry, quantization, answer, images))
    sums = whole_convolution(codes, weight, geometry, quantization)[0]
    assert torch.equal(found, answer.images(*sums.shape[2:]).pack(requantise(sums, answer)))


@each_row([row for row in bits_conv_rows() if not row.planes])
def test_a_code_that_is_too_great_is_refused_wherever_it_stands(row: BitsConv) -> None:
    geometry, two = Geometry(5, 7, (3, 3)), Quantization(0.5, bits=2)
    prepared, codes = (
        row.prepare(weight_of(twos(2), geometry), geometry),
        torch.full((2, 5, 6, 5), 3, dtype=torch.uint8),
    )
    x, images = coded_of(row, codes, 2)
    problem = BitsConvProblem(geometry, two, coded=images)
    want = row.run(x, prepared, None, problem)
    x[:, 1:64] = 255  # of the head, which holds no codes
    assert torch.equal(row.run(x, prepared, None, problem), want)
    for place in (64, 79, 127, 128, 200, 64 + 30 * 8 - 1):
        x[1, place] += 4
        with pytest.raises(KernelError, match="codes from 0 to 3"):
            row.run(x, prepared, None, problem)
        x[1, place] -= 4
