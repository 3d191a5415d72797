"""Convolutions whose input gradient is computed from a pruned dL/dz; the gradients of weight and bias are exact.

Inside `torch.compile` the data gradient is an opaque operator, as that of `sparse_linear.module` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from twofour.kernels.conv import Geometry
from twofour.kernels.nm_conv_gradient import DataGradient
from twofour.kernels.registration import register
from twofour.layers import CARRIED
from twofour.training.sdgp.pruned_gradient import PrunedGradient
from twofour.training.sparse_linear import Call, LinearProducts
from twofour.training.sparse_linear.implementations import TORCH
from twofour.training.sparse_linear.module import as_autocast, as_it_is, first_derivative
from twofour.training.sparse_linear.products import numbered
from twofour.training.sparse_linear.source import Convolution
from twofour.training.step_clock import part

CHANNELS_LAST, CONTIGUOUS = "torch channels-last", "torch contiguous"
"""Dense implementations: torch's own in the other memory format than that of the input."""


def prune(gradient: Tensor, number: int) -> Tensor:
    """Return the pruned dL/dz of a convolution, (N, C, [spatial]) of any memory format, which it keeps."""
    rows = gradient.movedim(1, -1)
    source = cast(PrunedGradient, numbered(number).sources["data"])
    return source.prune(rows.flatten(1, -2)).view(rows.shape).movedim(-1, 1)


def _compiled(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    number: int,
) -> Tensor:
    """Return the input's gradient as compiled graphs were promised it: in the strides of a tensor like x."""
    found = _data_gradient(numbered(number), gradient, weight, x, (stride, padding, dilation, groups))
    promised = torch.empty_like(x)
    return found if found.stride() == promised.stride() else promised.copy_(found)


register(
    "sdgp_convolution_gradient(Tensor gradient, Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, "
    "int groups, int number) -> Tensor",
    lambda gradient, x, *others: torch.empty_like(x),
    CompositeExplicitAutograd=_compiled,
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
        with nullcontext() if torch.compiler.is_compiling() else part("forward"):
            return convolve(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient, compiling = gradients[0], first_derivative(ctx.number)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            if compiling:
                dx = torch.ops.twofour.sdgp_convolution_gradient(gradient, x, weight, *ctx.geometry, ctx.number)
            else:
                dx = _data_gradient(ctx.products, gradient, weight, x, ctx.geometry)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            wanted = [False, ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
            with nullcontext() if compiling else part("weight gradient"):
                _, dw, db = _exact(gradient, x, weight, ctx.geometry, wanted)
        return dx, dw, db, *[None] * 5


def _exact(
    of: Tensor, x: Tensor, weight: Tensor, geometry: tuple[Any, ...], wanted: list[bool]
) -> tuple[Tensor | None, ...]:
    """Return those gradients of input, weight and bias that are wanted, as torch computes them."""
    stride, padding, dilation, groups = geometry
    transposed, extra = False, [0] * len(stride)
    whole = (stride, padding, dilation, transposed, extra, groups)
    return torch.ops.aten.convolution_backward(of, x, weight, [len(weight)], *whole, wanted)


def _data_gradient(
    products: LinearProducts, gradient: Tensor, weight: Tensor, x: Tensor, geometry: tuple[Any, ...]
) -> Tensor:
    """Return the input's gradient of a convolution, in the memory format of x where that has one.

    Args:
        products: Of the layer.
        gradient: dL/dz, (N, C, [spatial]) of any memory format; kernels read channels-last rows.
        weight: (out, in, [taps]).
        x: The input, whose sizes and memory format are read.
        geometry: Stride, padding, dilation and groups.
    """
    pixels = gradient.movedim(1, -1)
    last = not x.is_contiguous()

    def exact(left: Tensor, form: torch.memory_format | None) -> Tensor:
        return _in_format(form, left.view(pixels.shape).movedim(-1, 1), x, weight, geometry)

    ways = {TORCH: lambda left, _: exact(left, None)}
    problem = _problem(weight, x, geometry)
    if x.ndim == 4 and x.is_cpu and _sound(problem.geometry):
        other = torch.contiguous_format if last else torch.channels_last
        ways[CONTIGUOUS if last else CHANNELS_LAST] = lambda left, _: exact(left, other)
    convolution = Convolution(weight, problem, last)
    return products.run(Call("data", pixels.flatten(1, -2), _matrix(weight), dense=ways, convolution=convolution))


def _sound(geometry: Geometry) -> bool:
    """Whether torch's convolution is asked for in a memory format that the net does not have.

    oneDNN's channels-last convolutions of groups, and of windows that lie in the padding alone, have ended the process.
    """
    reach = [d * (k - 1) for d, k in zip(geometry.dilation, geometry.kernel, strict=True)]
    inside = all(before <= far for before, far in zip(geometry.before, reach, strict=True))
    return inside and geometry.groups == 1 and torch.backends.mkldnn.is_available()


def _in_format(
    form: torch.memory_format | None, left: Tensor, x: Tensor, weight: Tensor, geometry: tuple[Any, ...]
) -> Tensor:
    """Return what torch makes of a pruned gradient, in another memory format than that of x where one is given."""
    wanted = [True, False, False]
    if form is None:
        return cast(Tensor, _exact(left, x, weight, geometry, wanted)[0])
    operands = left.contiguous(memory_format=form), torch.empty_like(x, memory_format=form)  # of x the sizes are read
    found = cast(Tensor, _exact(*operands, weight.contiguous(memory_format=form), geometry, wanted)[0])
    back = torch.channels_last if form is torch.contiguous_format else torch.contiguous_format
    return found.contiguous(memory_format=back)


def _matrix(weight: Tensor) -> Tensor:
    """Return a weight (out, in, [taps]) as (in and taps in some order, out): a view where that is possible."""
    return (weight if weight.is_contiguous() else weight.movedim(1, -1)).flatten(1).t()


def _problem(weight: Tensor, x: Tensor, geometry: tuple[Any, ...]) -> DataGradient:
    stride, padding, dilation, groups = geometry
    taps, size = tuple(weight.shape[2:]), tuple(x.shape[2:])
    if len(taps) == 1:  # images of height 1
        taps, size, stride, padding, dilation = (1, *taps), (1, *size), (1, *stride), (0, *padding), (1, *dilation)
    around = (padding[0], padding[1])
    whole = Geometry(
        *(x.shape[1], len(weight), (taps[0], taps[1]), (stride[0], stride[1]), around, around),
        *((dilation[0], dilation[1]), groups),
    )
    return DataGradient.at(whole, (len(x), size[0], size[1]))


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
