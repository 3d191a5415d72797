"""How a layer is made to call its products: its class becomes a subclass of itself, as `parametrize` does.

A hook cannot tell the input's gradient from the weight's, since both come from one dL/dz, and two products with
detached operands would compute twice. A subclass overrides one method and patches nothing: the module, its
parameters, hooks, buffers and state dict stay the same objects, `isinstance` holds, and copies and pickles work.

Inside `torch.compile` the data gradient is an opaque operator that names its layer's products by number; around it the
graph is as usual. The operator is not pure: random modes count their draws. Products whose forward pass is sparse break
the graph.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from twofour.errors import TrainingError
from twofour.kernels.column_sums import DTYPES, column_sums
from twofour.kernels.registration import register
from twofour.layers import CARRIED, is_hugging_face_conv1d, put_over
from twofour.training.fused import apart
from twofour.training.sparse_linear.products import LinearProducts, numbered

register(
    "sparse_data_gradient(Tensor gradient, Tensor weight, int number) -> Tensor",
    lambda gradient, weight, number: gradient.new_empty(*gradient.shape[:-1], weight.shape[1]),
    CompositeExplicitAutograd=lambda gradient, weight, number: numbered(number).data_gradient(gradient, weight),
)


class _Products(torch.autograd.Function):
    """X W^T + b and its three gradients, each by the products of that number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
        # As many tensors as the dense layer: x only where the weight learns. torch refuses a backward pass through a
        # weight that has moved since.
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.number, ctx.bias = number, None if bias is None else bias.dtype
        if torch.compiler.is_compiling():
            return functional.linear(x, weight, bias)
        ctx.products = numbered(number)  # the graph may outlive the layer
        y = ctx.products.forward(x, weight, bias)
        # No view, which what follows could not overwrite: an activation in place does.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], len(weight)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient, compiling = gradients[0], first_derivative(ctx.number)
        products = None if compiling else ctx.products
        if products is not None and not products.backward_only:
            gradient = gradient.contiguous()
        rows = gradient.reshape(-1, gradient.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            if products is None:
                dx = torch.ops.twofour.sparse_data_gradient(gradient, weight, ctx.number)
            else:
                dx = products.data_gradient(gradient, weight)
        if ctx.needs_input_grad[1]:
            if products is None:
                dw = rows.t() @ x.reshape(-1, x.shape[-1])
            else:
                dw = products.weight_gradient(gradient, x, weight.dtype)
        if ctx.needs_input_grad[2]:
            db = _sums(rows, native=products is not None).to(ctx.bias)
        return dx, dw, db, None


def _sums(rows: Tensor, *, native: bool) -> Tensor:
    """Return a bias's gradient in float32; torch's sum of many wide rows takes up to twice as long."""
    reads = native and type(rows) is Tensor and rows.is_cpu and rows.dtype in DTYPES and rows.stride(1) == 1
    return column_sums(rows) if reads else rows.sum(0)


def first_derivative(number: int) -> bool:
    """Raise unless this is a plain backward pass; returns whether it is being compiled."""
    if torch.compiler.is_compiling():
        return True
    if torch.is_grad_enabled():
        products = numbered(number)
        raise TrainingError(
            f"a gradient under {products.title} has no derivative",
            got="backward(create_graph=True), or grad of a grad",
            wanted="first derivatives",
            remedy="leave the layer out with attach(..., skip=[...]), or take handle.remove() before",
            layer=products.plan.name,
        )
    return False


def as_autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Cast as autocast would, outside of the function: it then saves the small copies, not the large originals."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, *others
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(t if t is None or t.dtype is torch.float64 else t.to(dtype) for t in (x, *others))


def as_it_is(products: LinearProducts, x: Tensor) -> bool:
    """Whether a call is the layer's own: nobody asks for the only gradient that differs, as in evaluation."""
    return products.backward_only and not (torch.is_grad_enabled() and x.requires_grad)


class SparseLinear(nn.Linear):
    """An `nn.Linear` while products are attached to it; (..., in) -> (..., out), in the computing type."""

    def forward(self, input: Tensor) -> Tensor:
        """Return X W^T + bias."""
        products: LinearProducts = self.__dict__[CARRIED]
        if as_it_is(products, input):
            return super().forward(input)
        if not products.backward_only:
            return through_products(products, input, self.weight, self.bias)
        weight, bias = self.weight, self.bias
        with apart():
            return cast(Tensor, _Products.apply(*as_autocast(input, weight, bias), products.number))


@torch.compiler.disable(reason="twofour: native, on raw pointers; a model that is exported whole is finished before")
def through_products(products: LinearProducts, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return X W^T + bias of a masked weight, as its parameter holds it."""
    with apart():
        (x,) = as_autocast(x)  # the weight is packed from the parameter itself, whatever the computing type
        _require_input(products, x, weight)
        with torch.autocast(x.device.type, enabled=False):
            products.meet(x.dtype)
            return cast(Tensor, _Products.apply(x, weight, bias, products.number))


def _require_input(products: LinearProducts, x: Tensor, weight: Tensor) -> None:
    """Refuse what the dense layer refuses: rows of another width, and a type that is neither autocast's nor its own."""
    columns = products.plan.shape[1]
    fits = x.ndim > 0 and x.shape[-1] == columns
    if fits and (x.dtype is weight.dtype or torch.is_autocast_enabled(x.device.type)):
        return
    own = str(weight.dtype).removeprefix("torch.")
    raise TrainingError(
        "the input does not fit the layer",
        got=f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}",
        wanted=f"{own} (..., {columns}), or another type inside torch.autocast",
        remedy="pass rows of the layer's width"
        if not fits
        else f"x.to(torch.{own}), or torch.autocast around the step",
        layer=products.plan.name,
    )


class SparseConv1D(nn.Module):
    """Hugging Face's Conv1D, a linear layer whose weight is (in, out), while its gradients are pruned."""

    def forward(self, x: Tensor) -> Tensor:
        """Return X W + bias."""
        products: LinearProducts = self.__dict__[CARRIED]
        if as_it_is(products, x):
            return super().forward(x)  # type: ignore[misc]
        weight, bias = self.weight, self.bias
        with apart():
            x, weight, bias = as_autocast(x, weight, bias)  # type: ignore[arg-type]
            return cast(Tensor, _Products.apply(x, weight.t(), bias, products.number))


def put_products(module: nn.Module, products: LinearProducts, *, over: type[nn.Module] | None = None) -> None:
    """Let a layer run its products from now on; `layers.take_off` undoes it.

    Args:
        module: A Linear, Hugging Face's Conv1D, or a layer that `over` is a subclass of.
        products: How they run.
        over: The class of ours that it becomes a subclass of; by default that of its linear layer.
    """
    over = over or (SparseConv1D if is_hugging_face_conv1d(module) else SparseLinear)
    put_over(module, _subclass(type(module), over), products)


@cache
def _subclass(base: type[nn.Module], over: type[nn.Module]) -> type[nn.Module]:
    """Return `over` itself where it stands on `base`, else both together: a user's own subclass keeps its forward."""
    if over.__bases__[-1] is base:
        return over
    return type(f"Sparse{base.__name__}", (over, base), {"__module__": over.__module__})


def on_top(module: nn.Module) -> bool:
    """Whether no other class was put over ours since, by a parametrisation for instance."""
    return CARRIED in module.__dict__ and type(module).__module__.startswith("twofour.training")
