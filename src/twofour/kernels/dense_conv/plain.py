"""The dense convolution as torch does it by default, channels last."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.kernels.conv import (
    ConvKernel,
    ConvProblem,
    Geometry,
    Images,
    PreparedConv,
    channels_last,
    finish,
    padded,
    require_image,
)
from twofour.kernels.operands import plain_bias
from twofour.kernels.problem import MaybeTensor


@dataclass(frozen=True)
class PlainConv(ConvKernel):
    """torch.conv2d on a channels-last weight; channels first where oneDNN, which does the work, needs that."""

    def reorder(self, weight: Tensor, geometry: Geometry, images: Images | None) -> Tensor:
        """Return a copy of the weight (out, in / groups, height, width), channels last or first."""
        return _channels_first(weight) if geometry.scattered else weight.clone(memory_format=torch.channels_last)

    def run(
        self, x: Tensor, weight: PreparedConv, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve; see `ConvKernel.run`."""
        geometry = problem.geometry
        require_image(x, geometry, other)
        bias = plain_bias(bias, geometry.out_channels)
        x, padding = padded(x if geometry.scattered else channels_last(x), geometry)
        held = weight.tensor
        if geometry.scattered:
            x, held = _channels_first(x), _channels_first(held)
        y = torch.conv2d(x, held, bias, geometry.stride, padding, geometry.dilation, geometry.groups)
        return finish(channels_last(y), problem.activation, other)


def _channels_first(x: Tensor) -> Tensor:
    """Return a copy with the strides of channels first, which of sizes 1 `contiguous` leaves as they are."""
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


PLAIN_CONV = PlainConv(
    "dense_conv_f32_channels_last__torch", "dense_conv", "dense", "float32", "cpu", "any", "dense_channels_last"
)
