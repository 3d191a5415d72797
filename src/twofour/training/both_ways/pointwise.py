"""Convolutions of one tap, stride 1 and one group: the products of a Linear over pixels."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from twofour.layers import CARRIED
from twofour.training.both_ways.masked_weight import MaskedWeight
from twofour.training.sparse_linear import LinearProducts
from twofour.training.sparse_linear.module import through_products


def pointwise(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of ours that a convolution of one tap becomes a subclass of, or None: it has more."""
    over = {nn.Conv1d: PointwiseConv1d, nn.Conv2d: PointwiseConv2d}.get(type(module))
    if over is None:
        return None
    conv = cast(nn.modules.conv._ConvNd, module)
    plain = all(size == 1 for size in (*conv.kernel_size, *conv.stride)) and conv.groups == 1
    return over if plain and not any(conv._reversed_padding_repeated_twice) else None


class _Pointwise(nn.modules.conv._ConvNd):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _through_pixels(self.__dict__[CARRIED], input, weight, bias)


class PointwiseConv1d(_Pointwise, nn.Conv1d):
    """A Conv1d of one tap while products are attached to it."""


class PointwiseConv2d(_Pointwise, nn.Conv2d):
    """A Conv2d of one tap while products are attached to it."""


@torch.compiler.disable(reason="twofour: native, on raw pointers")
def _through_pixels(products: LinearProducts, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the convolution of x ((images), in, [pixels]), in the memory format of x.

    Channels-last images are rows as they stand; others are copied into rows and back.
    """
    # The products have a view of the weight: what optimisers step is the parameter.
    cast(MaskedWeight, products.sources["forward"]).watch(weight)
    channels = 1 - weight.ndim
    rows = x.movedim(channels, -1)
    y = through_products(products, rows, weight.flatten(1), bias).movedim(-1, channels)
    return y.contiguous() if x.is_contiguous() and not rows.is_contiguous() else y
