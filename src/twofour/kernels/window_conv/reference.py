"""The int8 convolution in plain torch: what every fast kernel is compared with, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from twofour.kernels.conv import ACTIVATIONS, ConvProblem, padded
from twofour.kernels.quantization import quantize_input, quantize_output
from twofour.shapes import Float, Float32, Int8, Real


def window_conv_reference(
    x: Real[Tensor, "images channels height width"],
    whole: Int8[Tensor, "out channels rows columns"],
    scales: Float32[Tensor, " out"],
    bias: Float32[Tensor, " out"] | None,
    problem: ConvProblem,
    other: Float[Tensor, "images out high wide"] | None = None,
) -> Real[Tensor, "images out high wide"]:
    """Return activation(conv(x, W) + bias + other) as int8 kernels compute it: with ReLU, ReLU6 or none the same bits.

    sum = conv(q - zero, W) in whole numbers, where a pixel beside the image is zero; in float32, each step rounded
    once, y = sum * (scale * W's scale) + bias + other.

    Args:
        x: float32 or bfloat16, or uint8 of a static range.
        whole: Whole numbers of the weight, its zeros included.
        scales: float32 scale of each output channel.
        bias: float32 (out,) or None.
        problem: Geometry without groups, what follows, the input's range (dynamic: of each image), the answer's dtype.
        other: Of the output's shape, or None.

    Returns:
        (images, out, high, wide) in `quantization.output(x)`.
    """
    geometry, quantization = problem.geometry, problem.quantization
    q, scale, zero = quantize_input(x.flatten(1), quantization)  # an image is rounded as a token is
    scale, zero = scale.view(-1, 1, 1, 1), zero.view(-1, 1, 1, 1)
    values, padding = padded((q.view(x.shape) - zero).double(), geometry)
    sums = torch.conv2d(values, whole.double(), None, geometry.stride, padding, geometry.dilation)  # below 2^53: exact
    y = sums.float() * (scale * scales.view(-1, 1, 1))
    y = y if bias is None else y + bias.view(-1, 1, 1)
    y = ACTIVATIONS[problem.activation](y if other is None else y + other.float())
    return quantize_output(y, replace(quantization, y_dtype=quantization.output(x)))
