"""Winograd's convolutions on the CPU: rows of dense_conv.inc. The algorithm and its error: winograd/README.md."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
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
    finish,
    require_image,
)
from twofour.kernels.problem import MaybeTensor
from twofour.native import pages
from twofour.shapes import Float

POINTS = {"winograd2": (0.0, 1.0, -1.0), "winograd4": (0.0, 0.625, -0.625, 1.5, -1.5)}
"""Where the polynomials are evaluated besides infinity, by layout; those of winograd/points.h."""

AMPLIFIED = {"winograd2": 7.2, "winograd4": 62.7}
"""How many times the roundings of a sum can grow, at most: the factor of the bound in winograd/README.md."""


def weight_transform(layout: str) -> Float[Tensor, "places taps"]:
    """Return G of a layout in float64: what three taps of an axis are multiplied by (Lavin & Gray 2015, section 4)."""
    points = POINTS[layout]
    rows = [[p**k / prod(p - q for q in points if q != p) for k in range(3)] for p in points]
    if layout == "winograd2":  # its input transform has the other sign at 0
        rows[0] = [1.0, 0.0, 0.0]
    return torch.tensor([*rows, [0.0, 0.0, 1.0]], dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class WinogradConv(ConvKernel):
    """One row of dense_conv.inc: F(2x2, 3x3) or F(4x4, 3x3) of Lavin & Gray 2015.

    An infinity or NaN in `x` reaches every output of the tiles that read it.
    """

    close: ClassVar[bool] = True

    index: int

    def refuses(self, geometry: Geometry) -> str | None:
        """Return why not: another kernel than 3x3, a stride, a dilation or groups."""
        ones = (1, 1)
        sizes = (geometry.kernel, geometry.stride, geometry.dilation, geometry.groups)
        if sizes != ((3, 3), ones, ones, 1):
            return "takes 3x3 convolutions of stride 1 without dilation or groups"
        return self.unavailable()

    def remark(self, in_features: int) -> str:
        """Return the algorithm and its error bound, for the plan."""
        tile = self.layout[-1]
        bound = AMPLIFIED[self.layout] * (in_features // 9 + 20) * 2**-24
        return f"Winograd F({tile}x{tile}, 3x3), error at most {bound:.1e} of 9 sum max|x| max|w|"

    def reorder(self, weight: Tensor, geometry: Geometry, images: Images | None) -> Tensor:
        """Return the transformed weight, and the weight itself behind it: float32 in one row.

        Panels of 32 output channels, (places, in, 32) each, transformed in float64 and rounded once.
        """
        out, channels = weight.shape[:2]
        panel = native.extension().conv_panel
        transform = weight_transform(self.layout)
        places = torch.kron(transform, transform)  # of both axes: (inputs^2, 9)
        moved = (weight.reshape(-1, 9).double() @ places.T).float().view(out, channels, -1)
        moved = torch.nn.functional.pad(moved, (0, 0, 0, 0, 0, -out % panel))
        moved = moved.view(-1, panel, channels, len(places)).permute(0, 3, 2, 1)
        return pages.copy(torch.cat([moved.reshape(-1), weight.reshape(-1)]))

    def restore(self, prepared: PreparedConv) -> Tensor:
        """Return the weight as it came."""
        return prepared.tensor[-prod(prepared.shape) :].view(prepared.shape).clone()

    def run(
        self, x: Tensor, weight: PreparedConv, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve; see `ConvKernel.run`.

        Raises:
            KernelError: `x`, `weight`, `bias` or `other` does not fit.
        """
        geometry, activation = problem.geometry, problem.activation
        size = require_image(x, geometry, other)
        x, whole = channels_last(x), (x.shape[0], geometry.out_channels, *size)
        y = torch.empty(whole, dtype=torch.float32, memory_format=torch.channels_last, device="cpu")
        fused = activation in ("none", "relu", "relu6")
        other = None if other is None else channels_last(other)
        operands = (x, weight.tensor, bias, other if fused else None, y)
        axes = zip(geometry.kernel, geometry.stride, geometry.before, geometry.dilation, strict=True)
        code = problem.epilogue.codes[0] if fused else 0
        native.extension().dense_conv(self.index, *operands, 1, *axes, code, native.threads())
        return y if fused else finish(y, activation, other)


def winograd_rows() -> list[WinogradConv]:
    """Return the rows of dense_conv.inc in their order there."""
    return rows_of(WinogradConv, "dense_conv", *POINTS)
