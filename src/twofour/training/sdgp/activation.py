"""Activations whose backward pass makes dL/dz of the layer before them and prunes it in the same pass.

An activation module gets a class of its own, as layers do. Its call looks at the graph: where the input is what a layer
with pruned gradients has just returned, the call becomes one of `_Through`, whose backward pass leaves dL/dz in the
layer's workspace pruned or packed, as its product wants it. The layer takes it where the very tensor arrives that was
made. Where that is a sum with other gradients, or a node of the graph changed it, the layer prunes what it gets, and
draws the same. Where a hook waits for dL/dz nothing is pruned before it has run: a write through `data` or `numpy()`
leaves no trace. Nothing else of the graph is different: hooks and `retain_grad` see what they saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from twofour.kernels.activation import activation as computed
from twofour.kernels.epilogue import ACTIVATIONS
from twofour.training.sdgp.pruned_gradient import PrunedGradient
from twofour.training.sparse_linear import LinearProducts


def through(z: Tensor, activation: str, own: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return the answer of an activation that makes pruned gradients, or None where no layer waits for them."""
    products = _maker(z)
    return None if products is None else cast(Tensor, _Through.apply(z, products, activation, own))


def _maker(z: Tensor) -> LinearProducts | None:
    """Return the products of the layer whose output `z` is as it stands, if dL/dz can be pruned here."""
    node: Any = z.grad_fn if torch.is_grad_enabled() else None
    products = getattr(node, "products", None)
    if not isinstance(products, LinearProducts) or not node.needs_input_grad[0]:
        return None
    source = products.sources.get("data")
    return products if isinstance(source, PrunedGradient) and source.takes_through(z) else None


def _nothing(_: Tensor) -> None:
    """A hook that leaves the gradient as it is."""


class _Through(torch.autograd.Function):
    """y = activation(z) within the rounding of the module's, of z that a layer with pruned gradients returned."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, products: LinearProducts, activation: str, own: Any) -> Tensor:
        native = activation != "relu" and z.is_contiguous()  # torch's relu is as fast, and it keeps a memory format
        y = computed(z, activation) if native else own(z)
        ctx.save_for_backward(y if activation == "relu" else z)  # what torch's saves: the next layer has y too
        ctx.products, ctx.activation = products, activation
        z.register_hook(_nothing).remove()  # z has its dictionary of hooks now: it may be gone before the backward pass
        ctx.hooks = z._backward_hooks
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (at,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # the layer will refuse, if it is asked: others may have a second derivative
            dz = torch.autograd.grad(ACTIVATIONS[ctx.activation](at), at, gradients[0], create_graph=True)[0]
        else:
            source = cast(PrunedGradient, ctx.products.sources["data"])
            dz = source.through(ctx.products, gradients[0], at, ctx.activation, hooked=bool(ctx.hooks))
        return dz, None, None, None
