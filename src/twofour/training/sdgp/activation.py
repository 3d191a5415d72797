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
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from twofour.kernels.epilogue import ACTIVATIONS
from twofour.layers import put_over
from twofour.training.sdgp.pruned_gradient import PrunedGradient
from twofour.training.sparse_linear import LinearProducts

_TANH = ("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation", "GELUTanh", "PytorchGELUTanh")

_OWN = "_twofour_own"
"""Attribute of a class that was put over an activation's: that class."""


@dataclass(frozen=True)
class Carried:
    """What an activation carries.

    Attributes:
        title: What is attached, in messages.
    """

    title: str


def activation_of(module: nn.Module) -> str | None:
    """Return which of `kernels.epilogue.ACTIVATIONS` a module computes as it is set now, or None; in place none is."""
    kind = getattr(type(module), _OWN, type(module))
    if kind is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    if kind in (nn.ReLU, nn.SiLU):
        return None if module.inplace else "relu" if kind is nn.ReLU else "silu"
    if kind.__module__ != "transformers.activations":
        return None
    if kind.__name__ in _TANH:
        return "gelu_tanh"
    return {"GELUActivation": "gelu", "SiLUActivation": "silu"}.get(kind.__name__)


def put_through(module: nn.Module, title: str) -> None:
    """Let an activation make pruned gradients from now on; `layers.take_off` undoes it."""
    put_over(module, _over(type(module)), Carried(title))


class _Activation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        own: Callable[[Tensor], Tensor] = super().forward
        products = None if torch.compiler.is_compiling() else _maker(input)
        activation = activation_of(self) if products is not None else None  # settings may have changed since `attach`
        if activation is None:
            return own(input)
        return cast(Tensor, _Through.apply(input, products, activation, own))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # the class is made on demand: none to find by its name
        return _blank, (type(self).__bases__[-1],), self.__dict__


@cache
def _over(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"Sdgp{base.__name__}", (_Activation, base), {"__module__": __name__, _OWN: base})


def _blank(base: type[nn.Module]) -> nn.Module:
    over = _over(base)
    return over.__new__(over)


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
    """y = activation(z) as the module computes it, of z that a layer with pruned gradients returned."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, products: LinearProducts, activation: str, own: Any) -> Tensor:
        y = own(z)
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
