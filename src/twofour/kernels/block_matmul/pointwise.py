"""1x1 convolutions with weights of blocks, by the rows of block_matmul: a product over the channels of each pixel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from twofour.kernels.block_matmul.cpu import BlockMatmul, block_rows
from twofour.kernels.block_matmul.layout import last_index
from twofour.kernels.conv import (
    ConvKernel,
    ConvProblem,
    Geometry,
    Images,
    PreparedConv,
    channels_last,
    finish,
    require_image,
    require_packed,
)
from twofour.kernels.epilogue import ACTIVATIONS
from twofour.kernels.problem import MaybeTensor
from twofour.packing import Packed
from twofour.patterns import Block, Pattern
from twofour.patterns.block import LARGEST_SIDE


@dataclass(frozen=True)
class BlockConv(ConvKernel):
    """A 1x1 convolution of stride 1 with a weight of blocks.

    Attributes:
        product: The row that multiplies.
    """

    product: BlockMatmul

    def takes(self, pattern: Pattern) -> bool:
        """See `ConvKernel.takes`: blocks of every size."""
        return isinstance(pattern, Block)

    def refuses(self, geometry: Geometry) -> str | None:
        """Return why not: a convolution that is more than a product, or more channels than an index of 16 bits says."""
        if not geometry.pointwise:
            return "blocks have kernels for 1x1 convolutions of stride 1 without groups or padding"
        if geometry.in_channels > last_index() - LARGEST_SIDE:
            return f"in_channels {geometry.in_channels} is more than {last_index() - LARGEST_SIDE}"
        return self.unavailable()

    def prepare(self, weight: Packed | Tensor, geometry: Geometry, images: Images | None = None) -> PreparedConv:
        """Return a packed weight (out, in, [1,] 1) as the product reads it; see `ConvKernel.prepare`.

        Raises:
            PackingError: The weight is not packed, as its zeros do not say which blocks they are, or too wide.
        """
        weight = require_packed(weight, "blocks", "block:16x16@0.9")
        flat = replace(weight, header=replace(weight.header, shape=weight.header.shape[:2], axis=1))
        tensor, shape = self.product.prepare(flat).tensor, tuple(weight.header.shape)
        return PreparedConv(self, tensor, geometry=geometry, images=images, shape=shape)

    def reorder(self, weight: Tensor, geometry: Geometry, images: Images | None) -> Tensor:
        """Refuse: see `prepare`, which needs a packed weight."""
        raise NotImplementedError(self.name)

    def restore(self, prepared: PreparedConv) -> Packed:
        """Return the canonical form."""
        packed = self.product.restore(prepared)
        shape = prepared.shape or (*packed.header.shape, 1, 1)
        return replace(packed, header=replace(packed.header, shape=shape, axis=1))

    def run(
        self, x: Tensor, weight: PreparedConv, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve; see `ConvKernel.run`. A product activates before it adds, and has no ReLU6: they come after."""
        height, width = require_image(x, problem.geometry, other)
        pixels = channels_last(x).permute(0, 2, 3, 1).reshape(-1, problem.geometry.in_channels)
        within = other is None and problem.activation in ACTIVATIONS
        alone = problem if within else ConvProblem.of(problem.geometry)
        y = self.product.run(pixels, weight, bias, alone)
        y = y.view(x.shape[0], height, width, problem.rows).permute(0, 3, 1, 2)
        return y if within else finish(y, problem.activation, None if other is None else channels_last(other))


def pointwise_block_rows() -> list[BlockConv]:
    """Return a row for 1x1 convolutions for each float32 row of block_matmul."""
    return [
        BlockConv(
            row.name.replace("block_matmul_f32", "block_conv_f32_1x1"),
            *("block_conv", "block", "float32", "cpu", row.isa, row.layout, row),
        )
        for row in block_rows()
        if row.dtype == "float32"
    ]
