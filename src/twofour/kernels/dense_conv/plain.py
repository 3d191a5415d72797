"""The dense convolution as torch does it by default, channels last."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry, Images, channels_last, finish, padded, require_image
from twofour.kernels.operands import plain_bias
from twofour.kernels.problem import MaybeTensor


@dataclass(frozen=True)
class PlainConv(ConvKernel):
    """torch.conv2d on a channels-last weight; channels first where oneDNN, which does the work, needs that."""

    def prepare(self, weight: Tensor, geometry: Geometry, images: Images | None = None) -> Tensor:
        """Return the weight (out, in / groups, height, width), channels last or first."""
        return _channels_first(weight.detach()) if geometry.scattered else channels_last(weight.detach())

    def run(
        self, x: Tensor, weight: Tensor, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve; see `ConvKernel.run`."""
        geometry = problem.geometry
        require_image(x, geometry, other)
        bias = plain_bias(bias, geometry.out_channels)
        x, padding = padded(x if geometry.scattered else channels_last(x), geometry)
        if geometry.scattered:
            x, weight = _channels_first(x), _channels_first(weight)
        y = torch.conv2d(x, weight, bias, geometry.stride, padding, geometry.dilation, geometry.groups)
        return finish(channels_last(y), problem.activation, other)


def _channels_first(x: Tensor) -> Tensor:
    """Return a copy with the strides of channels first, which of sizes 1 `contiguous` leaves as they are."""
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


PLAIN_CONV = PlainConv(
    "dense_conv_f32_channels_last__torch", "dense_conv", "dense", "float32", "cpu", "any", "dense_channels_last"
)
