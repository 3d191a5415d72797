"""Straight-through estimators: rounding in the forward pass, gradients as if there were none (Bengio et al. 2013).

Each is a function of its own: x + (rounded - x).detach(), the usual way to write it, is not exactly the rounded number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

Round = Callable[[Tensor], Tensor]


class _Nearest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rounded: Round, least: Any, most: Any) -> Tensor:
        ctx.save_for_backward((values >= least) & (values <= most))
        return rounded(values).clamp(least, most)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        return gradients[0] * inside, None, None, None


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rounded: Round) -> Tensor:
        return rounded(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values.abs() <= 1)
        signs = torch.where(values < 0, -1.0, 1.0)
        return torch.where(values.isnan(), values, signs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (near,) = ctx.saved_tensors
        return gradients[0] * near


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] * ctx.factor, None


class _Valued(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, others: Tensor) -> Tensor:
        return others.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _NoContext:
    """Stands for the context of a call without gradients."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        pass


def _made(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Return the value of a function; without gradients of its operators alone, which every tracer follows."""
    if torch.is_grad_enabled():
        return cast(Tensor, function.apply(*arguments))
    return function.forward(_NoContext(), *arguments)


def nearest(values: Tensor, rounded: Round, least: Tensor | float, most: Tensor | float) -> Tensor:
    """Return rounded values between two levels, both numbers or both tensors; gradients pass between them alone.

    Numbers stay numbers: a tensor made of one on a GPU waits for all that the GPU has to do.
    """
    return _made(_Nearest, values, rounded, least, most)


def straight(values: Tensor, rounded: Round) -> Tensor:
    """Return rounded values; every gradient passes."""
    return _made(_Straight, values, rounded)


def valued(values: Tensor, others: Tensor) -> Tensor:
    """Return other values of the same shape; every gradient passes to the first."""
    return _made(_Valued, values, others)


def by_sign(values: Tensor) -> Tensor:
    """Return 1 where a value is zero or more, else -1; gradients pass where |x| <= 1."""
    return _made(_Sign, values)


def scaled_gradient(value: Tensor, factor: float) -> Tensor:
    """Return the value itself, whose gradient is multiplied by a factor."""
    return _made(_Scaled, value, factor)
