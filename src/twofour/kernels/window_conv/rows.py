"""Convolutions in int8 on the CPU: rows of window_conv.inc."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.base import FLOATS, Kernel, Prepared
from twofour.kernels.conv import (
    ACTIVATIONS,
    ConvKernel,
    ConvProblem,
    Geometry,
    Images,
    PreparedConv,
    channels_last,
    require_image,
    too_many_taps,
)
from twofour.kernels.dense_matmul import native_dense_rows, stored_rows, whole_rows
from twofour.kernels.epilogue import PLAIN_EPILOGUE
from twofour.kernels.native_product import foreign, not_plain
from twofour.kernels.nm_matmul import native_rows
from twofour.kernels.problem import MaybeTensor
from twofour.kernels.quantization import LARGEST_REDUCTION, quantize_output
from twofour.packing import Packed, pack
from twofour.packing.encodings.base import nonzero_scales
from twofour.packing.encodings.int8 import INT8_LARGEST

ADDED_FIRST = ("none", "relu", "relu6")
"""Activations that follow a residual sum in the kernel's pass; others are a pass of their own."""


@dataclass(frozen=True)
class WindowConv(ConvKernel):
    """A convolution without groups as a product of bytes, its tokens windows over the images.

    The input is rounded to bytes by a static range, or by one of each image; an image that holds a NaN or an infinity
    then answers NaN everywhere. Weights are rounded symmetrically for each output channel.

    Attributes:
        product: The row of a product that reads the same weight: it prepares and restores it.
    """

    index: int
    product: Kernel

    def refuses(self, geometry: Geometry) -> str | None:
        """Return why not: groups, channels that do not make groups of four, sums that may exceed int32."""
        if geometry.groups != 1:
            return "takes convolutions without groups"
        if self.sparse and geometry.in_channels % 4:
            return f"in_channels {geometry.in_channels} is not a multiple of 4"
        most = geometry.columns <= LARGEST_REDUCTION if self.sparse else self.product.fits(1, geometry.columns)
        if not most:
            return f"sums of {geometry.columns} inputs may exceed int32"
        return too_many_taps(geometry) or self.unavailable()

    def reorder(self, weight: Tensor, geometry: Geometry, images: Images | None) -> Tensor:
        """Return the weight, its inputs tap by tap, in whole numbers in the product's layout."""
        rows = weight.permute(0, 2, 3, 1).reshape(len(weight), -1)
        # A file holds 127 s, rounded: of the scale that is found in that, one more such step changes nothing.
        scales = nonzero_scales(rows.abs().amax(1, keepdim=True) / INT8_LARGEST) * INT8_LARGEST / INT8_LARGEST
        whole = (rows / scales).round().to(torch.int8)
        if self.sparse:
            return self.product.prepare(replace(pack(whole, self.pattern), scales=scales)).tensor
        return self.product.prepare(stored_rows(whole, scales.flatten())).tensor

    def restore(self, prepared: PreparedConv) -> Packed:
        """Return the weight in whole numbers, packed along its channels; each tap of an output has its scale."""
        geometry = prepared.geometry
        whole, scales = whole_rows(self.product.stored(Prepared(self.product, prepared.tensor)))
        image = whole.view(len(whole), *geometry.kernel, -1).permute(0, 3, 1, 2).reshape(prepared.shape)
        taps = geometry.kernel[0] * geometry.kernel[1]
        return replace(pack(image, self.pattern, axis=1), scales=scales.repeat_interleave(taps).unsqueeze(1))

    def run(
        self, x: Tensor, weight: PreparedConv, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve; see `ConvKernel.run`. x and `other` may be bfloat16 too, x uint8 where its range is static.

        Returns:
            (images, out_channels, height, width) in `problem.quantization.output(x)`, channels last.
        """
        geometry, quantization = problem.geometry, problem.quantization
        if not quantization.plain:
            raise not_plain(self.name, quantization)
        reads, dtype = FLOATS if quantization.dynamic else (*FLOATS, torch.uint8), quantization.output(x)
        size = require_image(x, geometry, other, reads, FLOATS)
        shape = (x.shape[0], geometry.out_channels, *size)
        y = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last, device="cpu")
        if other is not None and problem.activation not in ADDED_FIRST:
            sums = replace(problem, epilogue=PLAIN_EPILOGUE, quantization=replace(quantization, y_dtype=torch.float32))
            y = ACTIVATIONS[problem.activation](self.run(x, weight, bias, sums, other.float()))
            return quantize_output(y, replace(quantization, y_dtype=dtype))
        operands = channels_last(x), weight.tensor, bias, None if other is None else channels_last(other), y
        axes = zip(geometry.kernel, geometry.stride, geometry.before, geometry.dilation, strict=True)
        code = problem.epilogue.codes[0]
        given = self.index, *operands, *axes, code, *quantization.codes, native.threads()
        if not native.extension().window_conv(*given):
            raise foreign(self, weight.tensor, geometry.out_channels, geometry.columns)
        return y


def window_conv_rows() -> list[WindowConv]:
    """Return the rows of window_conv.inc in their order there: of 2:4 and of dense weights."""
    products = {(row.layout, row.isa): row for row in (*native_rows(), *native_dense_rows())}
    return [
        WindowConv(
            *(row.name, row.operation, row.pattern, row.dtype, "cpu", row.isa, row.layout, row.index),
            products[row.layout, row.isa],
        )
        for row in native.rows("window_conv")
    ]
