"""Native 2:4 convolutions on the CPU: rows of nm_conv.inc, and 1x1 convolutions by the rows of nm_matmul."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.base import Kernel, rows_of
from twofour.kernels.conv import (
    ConvKernel,
    ConvProblem,
    Geometry,
    Images,
    PreparedConv,
    channels_last,
    require_image,
    require_packed,
    too_many_taps,
)
from twofour.kernels.epilogue import ACTIVATIONS
from twofour.kernels.native_product import foreign
from twofour.kernels.nm_conv.layout import DUAL, LAYOUT, from_conv_layout, to_conv_layout
from twofour.kernels.nm_matmul import native_rows
from twofour.kernels.nm_matmul.hybrid import hybrid_rows, two_regions
from twofour.kernels.problem import MaybeTensor
from twofour.packing import Packed
from twofour.patterns import Hybrid, Pattern


@dataclass(frozen=True)
class PackedConv(ConvKernel):
    """A row that reads weights of the layout `LAYOUT`, or of two regions of which one stands in it."""

    def takes(self, pattern: Pattern) -> bool:
        """See `ConvKernel.takes`; of two regions any share of dense groups."""
        return two_regions(pattern) if self.form is None else super().takes(pattern)

    def prepare(self, weight: Packed | Tensor, geometry: Geometry, images: Images | None = None) -> PreparedConv:
        """Return the weight in this row's layout; see `ConvKernel.prepare`.

        Raises:
            PackingError: As there; or one of two regions is not packed, as its zeros do not say which they are.
        """
        if self.form is not None:
            return super().prepare(weight, geometry, images)
        packed = require_packed(weight, "dense groups", "2:4+25%")
        rule, shape = packed.header.parsed(), packed.header.shape
        assert isinstance(rule, Hybrid), rule
        dense = packed.unpack() if len(shape) == 4 else packed.unpack().unsqueeze(2)
        return PreparedConv(self, to_conv_layout(dense, geometry, rule), geometry=geometry, images=images, shape=shape)

    def reorder(self, weight: Tensor, geometry: Geometry, images: Images | None) -> Tensor:
        """Return the weight behind a 64-byte header per group: uint8; see `to_conv_layout`."""
        return to_conv_layout(weight, geometry)

    def restore(self, prepared: PreparedConv) -> Packed:
        """Return the canonical form."""
        return from_conv_layout(prepared.tensor, prepared.geometry, prepared.shape)


@dataclass(frozen=True)
class NativeConv(PackedConv):
    """One row of nm_conv.inc, or of hybrid_conv.inc, whose weights have dense groups.

    Pruned positions are skipped: an infinity or NaN in `x` at such a position does not reach the output.

    Attributes:
        lead: What follows in a model is done in its pass, as in that of the dense rows it is compared with.
    """

    lead: ClassVar[float] = 0.9

    index: int

    def refuses(self, geometry: Geometry) -> str | None:
        """Return why not: channels that do not make groups of four, or a very large kernel."""
        each = geometry.in_channels // geometry.groups
        if each % 4:
            return f"in_channels / groups {each} is not a multiple of 4"
        if self.form is None and geometry.groups > 1:
            return f"dense groups of inputs are those of one product, not of {geometry.groups} groups of channels"
        return too_many_taps(geometry) or self.unavailable()

    def run(
        self, x: Tensor, weight: PreparedConv, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve; see `ConvKernel.run`.

        Raises:
            KernelError: `x`, `bias` or `other` does not fit, or the bytes were made for another kernel or geometry.
        """
        geometry = problem.geometry
        size = require_image(x, geometry, other)
        x, whole = channels_last(x), (x.shape[0], geometry.out_channels, *size)
        y = torch.empty(whole, dtype=torch.float32, memory_format=torch.channels_last, device="cpu")
        other = None if other is None else channels_last(other)
        axes = zip(geometry.kernel, geometry.stride, geometry.before, geometry.dilation, strict=True)
        call = native.extension().nm_conv if self.form is not None else native.extension().hybrid_conv
        ok = call(
            self.index,
            x,
            weight.tensor,
            bias,
            other,
            y,
            geometry.groups,
            *axes,
            problem.epilogue.codes[0],
            native.threads(),
        )
        if not ok:
            raise foreign(self, weight.tensor, geometry.out_channels, geometry.columns)
        return y


@dataclass(frozen=True)
class PointwiseConv(PackedConv):
    """A 1x1 convolution of stride 1 as a product over its pixels, by a row of nm_matmul.

    Attributes:
        product: That row.
        residual: The convolution of the same instruction set and layout that runs where there is an `other`.
        lead: Inside a model, where weights come from memory and a layer before wrote the image, products lose what they
            gain alone (README.md).
    """

    lead: ClassVar[float] = 1.0

    product: Kernel
    residual: NativeConv

    @property
    def native_convolution(self) -> int | None:
        """Return that of the convolution which reads the same weight: a chain's strips are no rows of tokens."""
        return self.residual.native_convolution

    def refuses(self, geometry: Geometry) -> str | None:
        """Return why not: a convolution that is more than a product, or channels that do not make groups of four."""
        if not geometry.pointwise:
            return "takes 1x1 convolutions of stride 1 without groups or padding"
        if geometry.in_channels % 4:
            return f"in_channels {geometry.in_channels} is not a multiple of 4"
        return self.unavailable()

    def run(
        self, x: Tensor, weight: PreparedConv, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve; see `ConvKernel.run`."""
        if other is not None or problem.activation not in ACTIVATIONS:
            # A product activates before it adds, and knows no ReLU6: a pass of its own took as long as the convolution.
            return self.residual.run(x, weight, bias, problem, other)
        height, width = require_image(x, problem.geometry, other)
        pixels = channels_last(x).permute(0, 2, 3, 1).reshape(-1, problem.geometry.in_channels)
        y = self.product.run(pixels, weight, bias, problem)
        return y.view(x.shape[0], height, width, problem.rows).permute(0, 3, 1, 2)


def native_conv_rows() -> list[NativeConv]:
    """Return the rows of nm_conv.inc in their order there."""
    return rows_of(NativeConv, "nm_conv")


def hybrid_conv_rows() -> list[NativeConv]:
    """Return the rows of hybrid_conv.inc in their order there."""
    return rows_of(NativeConv, "hybrid_conv")


def pointwise_rows() -> list[PointwiseConv]:
    """Return a row for 1x1 convolutions for each row of a product that takes the same prepared weight.

    What it leaves to a row of nm_conv goes to that of its own instruction set, else to the portable one.
    """
    blocks = {(row.layout, row.isa): row for row in (*native_conv_rows(), *hybrid_conv_rows())}
    return [
        PointwiseConv(
            row.name.replace("matmul_2x4_f32", "conv_2x4_f32_1x1").replace("matmul_f32", "conv_f32_1x1"),
            *(row.operation.replace("matmul", "conv"), row.pattern, "float32", "cpu", row.isa, row.layout, row),
            blocks.get((row.layout, row.isa), blocks[row.layout, "scalar"]),
        )
        for row in (*native_rows(), *hybrid_rows())
        if row.layout in (LAYOUT, DUAL)
    ]
