"""A 1x1 convolution of stride 1 as a product over its pixels, by a native row of dense_matmul."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Prepared
from twofour.kernels.conv import (
    ConvKernel,
    ConvProblem,
    Geometry,
    Images,
    PreparedConv,
    channels_last,
    require_image,
)
from twofour.kernels.dense_matmul import Float32Matmul, native_dense_rows
from twofour.kernels.epilogue import COMBINES, Epilogue
from twofour.kernels.problem import MaybeTensor, Problem


@dataclass(frozen=True)
class DensePointwise(ConvKernel):
    """Residual sums and activations are done while sums are stored.

    Attributes:
        product: The row.
        lead: What follows in a model is done in its pass, which costs a library's a pass of its own.
    """

    lead: ClassVar[float] = 0.9

    product: Float32Matmul

    def refuses(self, geometry: Geometry) -> str | None:
        """Return why not: a convolution that is more than a product."""
        return (
            self.unavailable() if geometry.pointwise else "takes 1x1 convolutions of stride 1 without groups or padding"
        )

    def reorder(self, weight: Tensor, geometry: Geometry, images: Images | None) -> Tensor:
        """Return the weight in the product's layout: uint8."""
        return self.product.prepare(weight.flatten(1)).tensor

    def restore(self, prepared: PreparedConv) -> Tensor:
        """Return the weight, float32, of the shape it had."""
        return self.product.restore(Prepared(self.product, prepared.tensor)).view(prepared.shape)

    def run(
        self, x: Tensor, weight: PreparedConv, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve; see `ConvKernel.run`."""
        height, width = require_image(x, problem.geometry, other)
        pixels = _pixels(x)
        if other is None:
            y = self.product.run(pixels, weight, bias, Problem(problem.rows, Epilogue(problem.activation)))
        else:
            y = torch.empty(len(pixels), problem.rows, dtype=torch.float32, device="cpu")
            codes = Epilogue(problem.activation).codes[0], len(COMBINES)  # added before the activation
            operands = (pixels, weight.tensor, bias, y, *codes, _pixels(other))
            if not native.extension().dense_matmul(self.product.index, *operands, native.threads()):
                raise KernelError(
                    f"{self.name} was given bytes made for another kernel",
                    got=f"a weight of {weight.tensor.nbytes} bytes",
                    wanted=f"panels of a float32 weight for {problem.geometry}",
                    remedy="prepare the weight with kernel.prepare(weight, geometry)",
                )
        return y.view(x.shape[0], height, width, problem.rows).permute(0, 3, 1, 2)


def _pixels(image: Tensor) -> Tensor:
    """Return an image as a matrix (pixels, channels): a view, channels last."""
    return channels_last(image).permute(0, 2, 3, 1).reshape(-1, image.shape[1])


def dense_pointwise_rows() -> list[DensePointwise]:
    """Return a row for each native float32 row of dense_matmul."""
    return [
        DensePointwise(
            row.name.replace("dense_matmul_f32", "dense_conv_f32_1x1"),
            *("dense_conv", "dense", "float32", "cpu", row.isa, row.layout, row),
        )
        for row in native_dense_rows()
        if isinstance(row, Float32Matmul)
    ]
