"""The differentiable products: forward and the gradients of weight and bias exact, the input's from a pruned dL/dz.

Inside `torch.compile` pruning is an opaque operator that names its layer's state by number; around it the graph is as
usual. The operators are not pure: random modes count their draws.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from twofour.errors import TrainingError
from twofour.training import products
from twofour.training.sdgp.state import found

_LIBRARY = torch.library.Library("twofour", "FRAGMENT")
_LIBRARY.define("sdgp_prune(Tensor gradient, int number) -> Tensor")
_LIBRARY.define("sdgp_input_gradient(Tensor gradient, Tensor weight, int number) -> Tensor")


def prune(gradient: Tensor, number: int) -> Tensor:
    """Return the pruned dL/dz of a convolution, (N, C, [spatial]) of any memory format, which it keeps."""
    rows = gradient.movedim(1, -1)
    return found(number).prune(rows.flatten(1, -2)).view(rows.shape).movedim(-1, 1)


def input_gradient(gradient: Tensor, weight: Tensor, number: int) -> Tensor:
    """Return pruned(dL/dz) W of a linear layer.

    Args:
        gradient: dL/dz, (..., out). The last axis but one stands for the pixels: tokens; the leading ones are samples.
            A gradient (tokens, out) is one sample.
        weight: (out, in), of the gradient's dtype.
        number: Of the layer's state.
    """
    rows = gradient.reshape(-1, gradient.shape[-2] if gradient.ndim > 1 else 1, gradient.shape[-1])
    names = products.names(gradient)
    dense = {name: partial(_dense_input_gradient, name, weight) for name in names}
    state = found(number)
    return state.ways.data_gradient(rows, weight, state, dense).view(*gradient.shape[:-1], weight.shape[1])


def _dense_input_gradient(way: str, weight: Tensor, left: Tensor) -> Tensor:
    return products.data_gradient(way, left.flatten(0, 1), weight)


def convolution_input_gradient(
    gradient: Tensor, weight: Tensor, number: int, exact: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the input's gradient of a convolution.

    Args:
        gradient: dL/dz, (N, C, [spatial]) of any memory format; a sparse product reads channels-last rows.
        weight: (out, in, [taps]).
        number: Of the layer's state.
        exact: What the convolution makes of a pruned gradient.
    """
    state, pixels = found(number), gradient.movedim(1, -1)
    why = None if pixels.is_contiguous() else "its gradient is not channels-last"
    rows = pixels.flatten(1, -2)
    dense = {products.TORCH: lambda left: exact(left.view(pixels.shape).movedim(-1, 1))}
    result = state.ways.data_gradient(rows, weight.flatten(1), state, dense, why)
    return result if result.ndim == gradient.ndim else result.view(*pixels.shape[:-1], -1).movedim(-1, 1)


_LIBRARY.impl("sdgp_prune", prune, "CompositeExplicitAutograd")
_LIBRARY.impl("sdgp_input_gradient", input_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("twofour::sdgp_prune", lambda gradient, number: torch.empty_like(gradient), lib=_LIBRARY)
torch.library.register_fake(
    "twofour::sdgp_input_gradient",
    lambda gradient, weight, number: gradient.new_empty(*gradient.shape[:-1], weight.shape[1]),
    lib=_LIBRARY,
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    """Return x W^T + b.

    Args:
        x: (..., in).
        weight: (out, in).
        bias: (out,) or None.
        number: Of the layer's state.
    """
    return _Linear.apply(x, weight, bias, number)  # pyright: ignore[reportReturnType]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    number: int,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Return the convolution of x (N, C, [spatial]) as `F.conv1d` and `F.conv2d` do; `number` as in `linear`."""
    return _Convolution.apply(x, weight, bias, number, stride, padding, dilation, groups)  # pyright: ignore


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
        # As many tensors as the dense layer: x only where the weight learns.
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.number = number
        if torch.compiler.is_compiling():
            return F.linear(x, weight, bias)
        ctx.state = found(number)  # the graph may outlive the layer
        return ctx.state.ways.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        compiling = _refuse_second_order(ctx.number)
        rows = gradient.reshape(-1, gradient.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            product = torch.ops.twofour.sdgp_input_gradient if compiling else input_gradient
            dx = product(gradient, weight, ctx.number)
        if ctx.needs_input_grad[1]:
            if compiling:
                dw = rows.t() @ x.reshape(-1, x.shape[-1])
            else:
                dw = found(ctx.number).ways.weight_gradient(gradient, x)
        if ctx.needs_input_grad[2]:
            db = rows.sum(0)
        return dx, dw, db, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        number: int,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.number, ctx.stride, ctx.padding, ctx.dilation, ctx.groups = number, stride, padding, dilation, groups
        if not torch.compiler.is_compiling():
            ctx.state = found(number)  # the graph may outlive the layer
        convolve = F.conv1d if weight.ndim == 3 else F.conv2d
        return convolve(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        compiling = _refuse_second_order(ctx.number)

        def exact(of: Tensor, wanted: list[bool]) -> tuple[Tensor | None, ...]:
            return torch.ops.aten.convolution_backward(
                of,
                x,
                weight,
                [weight.shape[0]],
                ctx.stride,
                ctx.padding,
                ctx.dilation,
                False,
                [0] * len(ctx.stride),
                ctx.groups,
                wanted,
            )

        dx = dw = db = None
        if ctx.needs_input_grad[0]:

            def data(left: Tensor) -> Tensor:
                return cast(Tensor, exact(left, [True, False, False])[0])

            if compiling:
                dx = data(torch.ops.twofour.sdgp_prune(gradient, ctx.number))
            else:
                dx = convolution_input_gradient(gradient, weight, ctx.number, data)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            _, dw, db = exact(gradient, [False, ctx.needs_input_grad[1], ctx.needs_input_grad[2]])
        return dx, dw, db, None, None, None, None, None


def _refuse_second_order(number: int) -> bool:
    """Raise unless this is a plain backward pass; returns whether it is being compiled."""
    if torch.compiler.is_compiling():
        return True
    if torch.is_grad_enabled():
        raise TrainingError(
            "a pruned gradient has no derivative",
            got="backward(create_graph=True), or grad of a grad",
            wanted="first derivatives",
            remedy="leave the layer out with attach(..., skip=[...]), or take handle.remove() before",
            layer=found(number).layer,
        )
    return False
