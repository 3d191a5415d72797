"""The data gradient in plain torch: what every fast kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.kernels.conv import Geometry
from twofour.shapes import Float


def nm_conv_gradient_reference(
    gradient: Float[Tensor, "images out high wide"],
    weight: Float[Tensor, "out channels rows columns"],
    geometry: Geometry,
    size: tuple[int, int],
) -> Float[Tensor, "images channels height width"]:
    """Return dL/dx (images, in, height, width) as the sum over taps that it is.

    Args:
        gradient: dL/dz, (images, out, height, width) of the output, dense.
        weight: (out, in, height, width).
        geometry: Of the convolution, which has one group.
        size: Height and width of the input.
    """
    (down, across), (above, left), (far, wide) = geometry.stride, geometry.before, geometry.dilation
    images, _, high, long = gradient.shape
    reach = [size[0] + 2 * above + far * geometry.kernel[0], size[1] + 2 * left + wide * geometry.kernel[1]]
    padded = gradient.new_zeros(images, weight.shape[1], *reach)
    for h in range(geometry.kernel[0]):
        for w in range(geometry.kernel[1]):
            rows = slice(h * far, h * far + down * (high - 1) + 1, down)
            columns = slice(w * wide, w * wide + across * (long - 1) + 1, across)
            padded[:, :, rows, columns] += torch.einsum("nohw,oi->nihw", gradient, weight[:, :, h, w])
    return padded[:, :, above : above + size[0], left : left + size[1]]
