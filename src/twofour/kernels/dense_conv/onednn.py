"""The dense convolution by oneDNN on a weight it has reordered once, with what it can do to the sum before storing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.kernels.conv import (
    SCATTERED,
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
from twofour.kernels.dense_matmul import ATTRIBUTES
from twofour.kernels.operands import plain_bias
from twofour.kernels.problem import MaybeTensor

REORDER_IMAGES = (1, 28, 28)
"""Input that the reorder is told where none is known. On others the weight may stand in an order that oneDNN has no
fast kernel for: 2048 x 512 x 1 x 1 made for 28 x 28 took 50 ms on 7 x 7, made for 7 x 7 it takes 1."""


FUSED = {name: words for name, words in ATTRIBUTES.items() if name != "silu"}
"""What it does while it stores: its SiLU takes twice the time of a pass of torch's."""


@dataclass(frozen=True)
class OneDnnConv(ConvKernel):
    """oneDNN convolution on a prepacked weight, as torch.compile's freezing uses it."""

    def unavailable(self) -> str | None:
        """Return why not: torch was built without oneDNN."""
        return None if torch.backends.mkldnn.is_available() else "this build of torch has no oneDNN"

    def refuses(self, geometry: Geometry) -> str | None:
        """Return why not: no oneDNN, or a geometry at which it can end the process."""
        return SCATTERED if geometry.scattered else self.unavailable()

    def reorder(self, weight: Tensor, geometry: Geometry, images: Images | None) -> Tensor:
        """Return the weight in oneDNN's blocked order: an opaque tensor of mkldnn layout.

        Raises:
            KernelError: The geometry is one at which oneDNN can end the process.
        """
        if geometry.scattered:
            raise KernelError(
                f"{self.name} is not run on this convolution",
                got=f"{geometry}: {SCATTERED}",
                wanted="one group, or no dilation, or stride 1",
                remedy="compile the model again: another kernel takes the layer",
            )
        count, *size = images or REORDER_IMAGES
        reach = [d * (k - 1) + 1 for d, k in zip(geometry.dilation, geometry.kernel, strict=True)]
        image = [count, geometry.in_channels, *map(max, size, reach)]
        padding = geometry.before if geometry.symmetric else (0, 0)
        return torch.ops.mkldnn._reorder_convolution_weight(
            weight.contiguous(), padding, geometry.stride, geometry.dilation, geometry.groups, image
        )

    def run(
        self, x: Tensor, weight: PreparedConv, bias: MaybeTensor, problem: ConvProblem, other: MaybeTensor = None
    ) -> Tensor:
        """Convolve; see `ConvKernel.run`. A weight reordered for images of another size is reordered once more."""
        geometry, activation = problem.geometry, problem.activation
        require_image(x, geometry, other)
        blocked = self._fitting(weight, (x.shape[0], x.shape[2], x.shape[3]))
        bias = plain_bias(bias, geometry.out_channels)
        x, padding = padded(channels_last(x), geometry)
        sizes = (padding, geometry.stride, geometry.dilation, geometry.groups)
        if other is None:
            kind, algorithm = FUSED.get(activation, ("none", ""))
            y = torch.ops.mkldnn._convolution_pointwise(x, blocked, bias, *sizes, kind, [], algorithm)
            return y if activation == "none" or activation in FUSED else finish(y, activation, None)
        y = torch.ops.mkldnn._convolution_pointwise.binary(
            x, channels_last(other), blocked, bias, *sizes, "add", None, None, [], ""
        )
        return y if activation == "none" else finish(y, activation, None)

    def _fitting(self, weight: PreparedConv, images: Images) -> Tensor:
        """Return the weight for images of this size; the last that it was not prepared for is kept."""
        if weight.images is None or images == weight.images:
            return weight.tensor
        known = weight.fitted.get(images)
        if known is None:
            known = self.reorder(weight.tensor.to_dense(), weight.geometry, images)
            weight.fitted.clear()
            weight.fitted[images] = known
        return known


ONEDNN_CONV = OneDnnConv(
    "dense_conv_f32_prepacked__onednn", "dense_conv", "dense", "float32", "cpu", "any", "onednn_conv"
)
