"""The convolution with a 2:4 weight in plain torch: what every fast kernel is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry, Images, PreparedConv, channels_last, finish, padded
from twofour.kernels.operands import plain_bias
from twofour.kernels.problem import MaybeTensor
from twofour.shapes import Float


def nm_conv_reference(
    x: Float[Tensor, "images channels height width"],
    weight: Float[Tensor, "out reduction rows columns"],
    bias: Float[Tensor, " out"] | None,
    geometry: Geometry,
) -> Float[Tensor, "images out high wide"]:
    """Return conv(x, W) + bias.

    Args:
        x: (images, in_channels, height, width), a floating dtype.
        weight: (out, in / groups, height, width) with its zeros.
        bias: (out,) or None.
        geometry: Strides, padding, dilation and groups.

    Returns:
        (images, out, height, width) in the dtype of `x`.
    """
    x, padding = padded(x, geometry)
    bias = None if bias is None else bias.to(x.dtype)
    return torch.conv2d(x, weight.to(x.dtype), bias, geometry.stride, padding, geometry.dilation, geometry.groups)


@dataclass(frozen=True)
class ReferenceConv(ConvKernel):
    """The reference as a row of the table; it keeps the weight dense, so it saves neither time nor memory."""

    def reorder(self, weight: Tensor, geometry: Geometry, images: Images | None) -> Tensor:
        """Return a copy of the dense weight."""
        return weight.clone()

    def run(
        self, x: Tensor, weight: PreparedConv, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve densely; see `ConvKernel.run`."""
        bias = plain_bias(bias, problem.rows)
        y = nm_conv_reference(x, weight.tensor, bias, problem.geometry)
        return finish(channels_last(y), problem.activation, other)


CONV_REFERENCE = ReferenceConv("nm_conv_any_reference__torch", "nm_conv", "any", "any", "cpu", "any", "unpacked")
