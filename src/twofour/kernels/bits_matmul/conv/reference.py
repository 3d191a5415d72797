"""The convolution of codes in plain torch, exact: what the kernels are compared with, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from twofour.kernels.bits_matmul.codes import BitWeight
from twofour.kernels.conv import Geometry
from twofour.kernels.quantization import Quantization, quantize_input
from twofour.shapes import Float32


def whole_convolution(
    x: Tensor, weight: BitWeight, geometry: Geometry, quantization: Quantization
) -> tuple[Tensor, Tensor]:
    """Return sums of products of the levels that images and weights are rounded to, int64, and each image's scale.

    Sums below 2^31 are exact in float64, which they are made in.

    Args:
        x: float32 (images, in_channels, height, width), or uint8 codes with a static range.
        weight: Codes (out, in_channels * taps), in the order of a Conv2d's weight.
        geometry: Without groups.
        quantization: Bits, levels and range of the inputs; a dynamic range is that of an image.
    """
    codes, scale, zero = quantize_input(x.flatten(1), quantization)
    levels = (codes.double() * quantization.factor - zero).view(x.shape)
    (top, left), (bottom, right) = geometry.before, geometry.after
    padded = functional.pad(levels, (left, right, top, bottom))
    values = weight.values().double().view(len(weight.codes), geometry.in_channels, *geometry.kernel)
    sums = functional.conv2d(padded, values, None, geometry.stride, 0, geometry.dilation)
    return sums.long(), scale.view(-1, 1, 1, 1)


def bits_conv_reference(
    x: Tensor,
    weight: BitWeight,
    bias: Float32[Tensor, " out"] | None,
    geometry: Geometry,
    quantization: Quantization,
) -> Tensor:
    """Return conv(x, W) + bias: sum * (x scale * w scale) + bias in float32, as the kernels do.

    Args:
        x: As `whole_convolution`.
        weight: Of (out, in_channels * taps) codes.
        bias: float32 (out,) or None.
        geometry: Without groups.
        quantization: Bits, levels and range of the inputs.

    Returns:
        float32 (images, out, height, width). What reads a NaN is NaN; of an image with a range of its own that is not
        finite everything is.
    """
    sums, scale = whole_convolution(x, weight, geometry, quantization)
    y = sums.float() * (scale * weight.scales.view(-1, 1, 1))
    y = y if bias is None else y + bias.view(-1, 1, 1)
    (top, left), (bottom, right) = geometry.before, geometry.after
    lost = functional.pad(x.isnan().any(1, keepdim=True).to(torch.float32), (left, right, top, bottom))
    ones = torch.ones(1, 1, *geometry.kernel, dtype=torch.float32, device=x.device)
    return y.masked_fill(functional.conv2d(lost, ones, None, geometry.stride, 0, geometry.dilation) > 0, torch.nan)
