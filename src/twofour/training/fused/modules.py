"""Activation modules: what they compute, and how one gets a class of its own, as layers do.

Most call a function of torch, which the mode serves. Those of transformers that write GELU's tanh form out take ten
passes backwards, and no function tells what they are: their class does. `sdgp` has all of them make pruned gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from twofour.layers import CARRIED, put_over
from twofour.training.fused.functions import Activation, plain
from twofour.training.fused.mode import followed_by_a_backward_pass

_WRITTEN_OUT = ("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation")
_TANH = (*_WRITTEN_OUT, "GELUTanh", "PytorchGELUTanh")

_OWN = "_twofour_own"
"""Attribute of a class that was put over an activation's: that class."""

Way = Callable[[Tensor, str, Callable[[Tensor], Tensor]], Tensor | None]
"""Input, activation and the module's own forward -> the answer, or None: it is not served."""


@dataclass(frozen=True)
class Carried:
    """What an activation carries.

    Attributes:
        title: What is attached, in messages.
        first: What is asked before the module's own forward, a function of a module; None: nothing.
        fused: Whether a formula that is written out is computed in one pass.
    """

    title: str
    first: Way | None
    fused: bool


def activation_of(module: nn.Module) -> str | None:
    """Return which of `kernels.epilogue.ACTIVATIONS` a module computes as it is set now, or None; in place none is."""
    kind = _kind(module)
    if kind is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    if kind in (nn.ReLU, nn.SiLU):
        return None if module.inplace else "relu" if kind is nn.ReLU else "silu"
    if kind.__module__ != "transformers.activations":
        return None
    if kind.__name__ in _TANH:
        return "gelu_tanh"
    return {"GELUActivation": "gelu", "SiLUActivation": "silu"}.get(kind.__name__)


def is_written_out(module: nn.Module) -> bool:
    """Whether a module computes an activation by elementary operations."""
    return activation_of(module) is not None and _kind(module).__name__ in _WRITTEN_OUT


def is_fused(module: nn.Module) -> bool:
    """Whether a formula that a module writes out is computed in one pass now."""
    carried = module.__dict__.get(CARRIED)
    return isinstance(carried, Carried) and carried.fused and is_written_out(module)


def put_through(module: nn.Module, title: str, first: Way | None = None, *, fused: bool = True) -> None:
    """Let an activation be computed another way from now on; `layers.take_off` undoes it."""
    put_over(module, _over(type(module)), Carried(title, first, fused))


class _Activation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        own: Callable[[Tensor], Tensor] = super().forward
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return own(input)
        carried: Carried = self.__dict__[CARRIED]
        activation = activation_of(self)  # settings may have changed since `attach`
        if activation is None:
            return own(input)
        if carried.first is not None and (y := carried.first(input, activation, own)) is not None:
            return y
        if is_fused(self) and followed_by_a_backward_pass() and plain(input):
            return cast(Tensor, Activation.apply(input, activation)) if input.requires_grad else own(input)
        return own(input)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # the class is made on demand: none to find by its name
        return _blank, (type(self).__bases__[-1],), self.__dict__


def _kind(module: nn.Module) -> type[nn.Module]:
    return getattr(type(module), _OWN, type(module))


@cache
def _over(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"Fused{base.__name__}", (_Activation, base), {"__module__": __name__, _OWN: base})


def _blank(base: type[nn.Module]) -> nn.Module:
    over = _over(base)
    return over.__new__(over)
