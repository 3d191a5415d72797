"""Convolutions whose input gradient is computed from a pruned dL/dz; the gradients of weight and bias are exact.

Inside `torch.compile` pruning is an opaque operator, as the data gradient of `sparse_linear.module` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from twofour.kernels.registration import register
from twofour.layers import CARRIED
from twofour.training.sdgp.pruned_gradient import PrunedGradient
from twofour.training.sparse_linear import Call, LinearProducts
from twofour.training.sparse_linear.implementations import TORCH
from twofour.training.sparse_linear.module import as_autocast, as_it_is, first_derivative
from twofour.training.sparse_linear.products import numbered


def prune(gradient: Tensor, number: int) -> Tensor:
    """Return the pruned dL/dz of a convolution, (N, C, [spatial]) of any memory format, which it keeps."""
    rows = gradient.movedim(1, -1)
    source = cast(PrunedGradient, numbered(number).sources["data"])
    return source.prune(rows.flatten(1, -2)).view(rows.shape).movedim(-1, 1)


register(
    "sdgp_prune(Tensor gradient, int number) -> Tensor",
    lambda gradient, number: torch.empty_like(gradient),
    CompositeExplicitAutograd=prune,
)


class _Convolution(torch.autograd.Function):
    """The convolution of x (N, C, [spatial]) as `functional.conv1d` and `conv2d` compute it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: int, *geometry: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.number, ctx.geometry = number, geometry
        if not torch.compiler.is_compiling():
            ctx.products = numbered(number)  # the graph may outlive the layer
        convolve = functional.conv1d if weight.ndim == 3 else functional.conv2d
        return convolve(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        gradient, compiling = gradients[0], first_derivative(ctx.number)

        def exact(of: Tensor, wanted: list[bool]) -> tuple[Tensor | None, ...]:
            transposed, extra = False, [0] * len(stride)
            geometry = (stride, padding, dilation, transposed, extra, groups)
            return torch.ops.aten.convolution_backward(of, x, weight, [weight.shape[0]], *geometry, wanted)

        def data(left: Tensor) -> Tensor:
            return cast(Tensor, exact(left, [True, False, False])[0])

        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            if compiling:
                dx = data(torch.ops.twofour.sdgp_prune(gradient, ctx.number))
            else:
                dx = _data_gradient(ctx.products, gradient, weight, data)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            _, dw, db = exact(gradient, [False, ctx.needs_input_grad[1], ctx.needs_input_grad[2]])
        return dx, dw, db, *[None] * 5


def _data_gradient(products: LinearProducts, gradient: Tensor, weight: Tensor, exact: Any) -> Tensor:
    """Return the input's gradient of a convolution.

    Args:
        products: Of the layer.
        gradient: dL/dz, (N, C, [spatial]) of any memory format; a 2:4 kernel reads channels-last rows.
        weight: (out, in, [taps]).
        exact: What the convolution makes of a pruned gradient, Tensor -> Tensor.
    """
    pixels = gradient.movedim(1, -1)
    dense = {TORCH: lambda left, _: exact(left.view(pixels.shape).movedim(-1, 1))}
    obstacle = "" if pixels.is_contiguous() else "its gradient is not channels-last"
    result = products.run(Call("data", pixels.flatten(1, -2), weight.flatten(1).t(), dense=dense, obstacle=obstacle))
    return result if result.ndim == gradient.ndim else result.view(*pixels.shape[:-1], -1).movedim(-1, 1)


class _SdgpConvolution(nn.modules.conv._ConvNd):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        products: LinearProducts = self.__dict__[CARRIED]
        if as_it_is(products, input):
            return super()._conv_forward(input, weight, bias)  # type: ignore[misc]
        padded, padding = _padded(self, input)
        batched = padded.ndim == weight.ndim
        operands = as_autocast(padded if batched else padded.unsqueeze(0), weight, bias)
        geometry = (list(self.stride), padding, list(self.dilation), self.groups)
        y = cast(Tensor, _Convolution.apply(*operands, products.number, *geometry))
        return y if batched else y.squeeze(0)


class SdgpConv1d(_SdgpConvolution, nn.Conv1d):
    """A Conv1d whose input gradient is computed from a pruned dL/dz."""


class SdgpConv2d(_SdgpConvolution, nn.Conv2d):
    """A Conv2d whose input gradient is computed from a pruned dL/dz."""


def _padded(conv: nn.modules.conv._ConvNd, x: Tensor) -> tuple[Tensor, list[int]]:
    """Return input and symmetric zero padding that amount to the layer's padding."""
    around: Sequence[int] = conv._reversed_padding_repeated_twice
    low, high = around[::2], around[1::2]
    if conv.padding_mode == "zeros" and list(low) == list(high):
        return x, list(reversed(low))
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return functional.pad(x, list(around), mode=mode), [0] * len(low)
