"""A Linear whose three products run as its plan says; it stays a Linear, with the parameters and keys it had."""

from __future__ import annotations

import threading
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from twofour.kernels import Kernel, find
from twofour.kernels.nm_unbiased import nm_unbiased, nm_unbiased_reference
from twofour.kernels.problem import Problem
from twofour.layers import CARRIED
from twofour.training import products
from twofour.training.both_ways.layouts import Layouts
from twofour.training.choice import LayerPlan
from twofour.training.step_clock import part

_scratch = threading.local()


class Ways:
    """What an attached layer carries: its plan, its mask and its packed weights. Copies along with its module.

    Attributes:
        plan: How its products run.
        keep: Mask of the weight, bool (out, in); None before the first.
        dense_parameter: Whether the parameter holds pruned values too (the mask moves).
        active: Whether the mask is in force.
        calls: Weight gradients so far; with `seed` it seeds the next estimate.
        seed: 32 bits, of this layer.
    """

    title = "2:4 both ways"

    def __init__(self, plan: LayerPlan, dense_parameter: bool, seed: int) -> None:
        self.dense_parameter, self.seed = dense_parameter, seed
        self.keep: Tensor | None = None
        self.active, self.calls = False, 0
        self.follow(plan)

    def follow(self, plan: LayerPlan) -> None:
        """Run the products as a plan says from now on."""
        self.plan, self.dtype = plan, cast(torch.dtype, getattr(torch, plan.dtype))
        self._kernels = {product: find(choice.kernel) for product, choice in plan.choices.items() if choice.sparse}
        wanted = {product: kernel for product, kernel in self._kernels.items() if product != "weight"}
        self.layouts = Layouts(wanted, self.dtype)
        self._dense_values: tuple[tuple[int, ...], Tensor] | None = None

    def put(self, keep: Tensor) -> None:
        """Put a mask in force; the layer keeps the tensor itself, and sees when it is changed in place."""
        if self.keep is not keep:
            self.layouts.forget_mask()
        self.keep, self.active = keep, True
        self.forget_values()

    def effective(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight that dense ways multiply by, in `dtype`: masked where the parameter is dense."""
        dense = weight.detach()
        keep = self.keep if self.active and self.dense_parameter else None
        if keep is None and dense.dtype == dtype:
            return dense
        state = (weight._version, weight.data_ptr(), -1 if keep is None else keep._version)
        if self._dense_values is None or self._dense_values[0] != state or self._dense_values[1].dtype != dtype:
            self._dense_values = state, (dense if keep is None else dense * keep).to(dtype)
        return self._dense_values[1]

    def forget_values(self) -> None:
        """Take it that the weight has moved, though its version may not show it."""
        self.layouts.forget_values()
        self._dense_values = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return X W^T + bias; x (tokens, in) of this plan's dtype."""
        kernel = self._kernels.get("forward") if self.active and x.dtype == self.dtype else None
        if kernel is None:
            with part("pack"):
                dense = self.effective(weight, x.dtype)
            with part("forward"):
                dense_bias = None if bias is None else bias.detach().to(x.dtype)
                return products.forward(self._dense("forward", x.dtype), x, dense, dense_bias)
        with part("pack"):
            packed = self.layouts.of("forward", weight, cast(Tensor, self.keep))
        with part("forward"):
            return kernel.run(x, packed, None if bias is None else bias.detach().float(), Problem(len(weight)))

    def _dense(self, product: str, dtype: torch.dtype) -> str:
        """The best dense way; torch's own for a type that nothing was measured in."""
        return self.plan.choices[product].dense if dtype == self.dtype else products.TORCH

    def data_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return dZ W; gradient (tokens, out)."""
        kernel = self._kernels.get("data") if self.active and gradient.dtype == self.dtype else None
        if kernel is None:
            with part("pack"):
                dense = self.effective(weight, gradient.dtype)
            with part("data gradient"):
                return products.data_gradient(self._dense("data", gradient.dtype), gradient, dense)
        with part("pack"):
            packed = self.layouts.of("data", weight, cast(Tensor, self.keep))
        with part("data gradient"):
            return kernel.run(gradient, packed, None, Problem(weight.shape[1]))

    def weight_gradient(self, gradient: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dZ^T X, or its unbiased estimate, in `dtype`; densely where the kernel cannot pack so many tokens."""
        kernel = self._kernels.get("weight") if self.active and gradient.dtype == self.dtype else None
        if kernel is None or len(x) % 4 or kernel.refill_refuses(gradient.shape[1], len(x)):
            with part("weight gradient"):
                return products.weight_gradient(self._dense("weight", gradient.dtype), gradient, x).to(dtype)
        with part("pack"):
            self.calls += 1
            seed = (self.seed + self.calls * 0x9E3779B1) & 0xFFFFFFFF
            estimate = estimated(kernel, gradient, seed, self.dtype)
        with part("weight gradient"):
            return kernel.run_columns(x, estimate, gradient.shape[1], dtype)


def estimated(kernel: Kernel, gradient: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """Return an unbiased 2:4 estimate of gradient^T along the tokens, packed for a row.

    On the CPU in this thread's buffer of that size: fresh pages would cost a third of the time. On a GPU by plain torch
    and `refill`.
    """
    if products.on_gpu(gradient.device):
        return kernel.refill(gradient, nm_unbiased_reference(gradient, seed).t())
    buffers: dict[tuple[object, ...], Tensor] = _scratch.__dict__.setdefault("buffers", {})
    key = (*gradient.shape, dtype)
    buffers[key] = nm_unbiased(gradient, seed, dtype, buffers.get(key))
    return buffers[key]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ways: Ways) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)  # torch refuses a backward pass through a weight that has moved since
        ctx.ways, ctx.shape, ctx.bias = ways, x.shape, None if bias is None else bias.dtype
        return ways.forward(flat, weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight = ctx.saved_tensors
        ways: Ways = ctx.ways
        g = gradient.reshape(-1, gradient.shape[-1])
        g = g if g.is_contiguous() else g.contiguous()
        dx = ways.data_gradient(g, weight).view(ctx.shape) if ctx.needs_input_grad[0] else None
        dw = ways.weight_gradient(g, flat, weight.dtype) if ctx.needs_input_grad[1] else None
        db = g.sum(0).to(ctx.bias) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


class BothWaysLinear(nn.Linear):
    """An `nn.Linear` while it is attached: `attach` exchanges the class and `remove` puts it back."""

    @torch.compiler.disable(reason="twofour: native, on raw pointers")
    def forward(self, input: Tensor) -> Tensor:
        """Return X W^T + bias with W masked; (..., in) -> (..., out) in the computing type."""
        ways: Ways = self.__dict__[CARRIED]
        dtype = computing_type(input)
        with torch.autocast(input.device.type, enabled=False):
            return cast(Tensor, _Product.apply(input.to(dtype), self.weight, self.bias, ways))


def computing_type(x: Tensor) -> torch.dtype:
    """Return the type that a Linear multiplies in: autocast's, else its input's."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
