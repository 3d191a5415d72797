"""A convolution with a filter of its own for each channel, by a native row: what follows is done in its pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.base import rows_of
from twofour.kernels.conv import (
    ConvEpilogue,
    ConvKernel,
    ConvProblem,
    Geometry,
    Images,
    PreparedConv,
    channels_last,
    finish,
    require_image,
    too_many_taps,
)
from twofour.kernels.problem import MaybeTensor


@dataclass(frozen=True)
class DepthwiseConv(ConvKernel):
    """One row of depthwise_conv.inc; padding may be uneven.

    Attributes:
        index: Its place there.
        lead: What follows in a model is done in its pass, which costs a library's a pass of its own.
    """

    lead: ClassVar[float] = 0.8

    index: int

    def refuses(self, geometry: Geometry) -> str | None:
        """Return why not: channels that share inputs, or a very large kernel."""
        if not geometry.in_channels == geometry.out_channels == geometry.groups:
            return "takes convolutions with a filter of its own for each channel"
        return too_many_taps(geometry) or self.unavailable()

    def reorder(self, weight: Tensor, geometry: Geometry, images: Images | None) -> Tensor:
        """Return the weight as (taps, channels)."""
        return weight.flatten(1).T.contiguous()

    def restore(self, prepared: PreparedConv) -> Tensor:
        """Return the weight, float32, of the shape it had."""
        return prepared.tensor.T.reshape(prepared.shape)

    def run(
        self, x: Tensor, weight: PreparedConv, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve; see `ConvKernel.run`."""
        geometry, activation = problem.geometry, problem.activation
        size = require_image(x, geometry, other)
        whole = (x.shape[0], geometry.out_channels, *size)
        y = torch.empty(whole, dtype=torch.float32, memory_format=torch.channels_last, device="cpu")
        axes = zip(geometry.kernel, geometry.stride, geometry.before, geometry.dilation, strict=True)
        code, _ = ConvEpilogue(activation if other is None else "none").codes
        native.extension().depthwise_conv(
            self.index, channels_last(x), weight.tensor, bias, y, *axes, code, native.threads()
        )
        return y if other is None else finish(y, activation, other)


def depthwise_rows() -> list[DepthwiseConv]:
    """Return the rows of depthwise_conv.inc in their order there."""
    return rows_of(DepthwiseConv, "depthwise_conv")
