"""Direct convolutions on the CPU: rows of dense_conv.inc that take any geometry. The design: direct/README.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.base import rows_of
from twofour.kernels.conv import (
    ConvKernel,
    ConvProblem,
    Geometry,
    Images,
    PreparedConv,
    channels_last,
    require_image,
    too_many_taps,
)
from twofour.kernels.problem import MaybeTensor
from twofour.native import pages

LAYOUT = "direct"


@dataclass(frozen=True)
class DirectConv(ConvKernel):
    """One row of dense_conv.inc: windows are read where they stand; residual sums and activations are done in its pass.

    Attributes:
        lead: What follows in a model is done in its pass, which costs a library's a pass of its own.
    """

    lead: ClassVar[float] = 0.9

    index: int

    def refuses(self, geometry: Geometry) -> str | None:
        """Return why not: a filter of its own for each channel, or a very large kernel."""
        if geometry.groups > 1 and geometry.in_channels == geometry.groups:
            return "a filter of its own for each channel is what the rows of depthwise_conv take"
        return too_many_taps(geometry) or self.unavailable()

    def takes_planes(self, geometry: Geometry) -> bool:
        """Whether it reads images of few channels as they often come, contiguous."""
        few = geometry.in_channels < native.extension().conv_few_channels
        return few and geometry.groups == 1 and geometry.dilation == (1, 1)

    def reorder(self, weight: Tensor, geometry: Geometry, images: Images | None) -> Tensor:
        """Return the weight in panels of 32 outputs of a group, (height, width, in, 32) each: float32 in one row."""
        panel, groups = native.extension().conv_panel, geometry.groups
        out = len(weight) // groups
        rows = weight.permute(0, 2, 3, 1).reshape(groups, out, -1)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -out % panel))
        panels = rows.view(groups, -1, panel, rows.shape[2]).transpose(2, 3)
        return pages.copy(panels.reshape(-1))

    def restore(self, prepared: PreparedConv) -> Tensor:
        """Return the weight as it came."""
        panel, geometry = native.extension().conv_panel, prepared.geometry
        out, channels = geometry.out_channels // geometry.groups, geometry.in_channels // geometry.groups
        panels = prepared.tensor.view(geometry.groups, -1, geometry.columns, panel)
        rows = panels.transpose(2, 3).reshape(geometry.groups, -1, geometry.columns)[:, :out]
        image = rows.reshape(geometry.out_channels, *geometry.kernel, channels).permute(0, 3, 1, 2)
        return image.contiguous().view(prepared.shape)

    def run(
        self, x: Tensor, weight: PreparedConv, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve; see `ConvKernel.run`.

        Raises:
            KernelError: `x`, `weight`, `bias` or `other` does not fit.
        """
        geometry = problem.geometry
        size = require_image(x, geometry, other)
        whole = (x.shape[0], geometry.out_channels, *size)
        y = torch.empty(whole, dtype=torch.float32, memory_format=torch.channels_last, device="cpu")
        operands = (self.image(x, geometry), weight.tensor, bias, None if other is None else channels_last(other), y)
        axes = zip(geometry.kernel, geometry.stride, geometry.before, geometry.dilation, strict=True)
        code = problem.epilogue.codes[0]
        native.extension().dense_conv(self.index, *operands, geometry.groups, *axes, code, native.threads())
        return y


def direct_rows() -> list[DirectConv]:
    """Return the direct rows of dense_conv.inc in their order there."""
    return rows_of(DirectConv, "dense_conv", LAYOUT)
