"""What a compiled model is known by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from twofour.errors import LayerError
from twofour.layers.modules import named_modules

SETTINGS = (bool, int, float, str, tuple)
"""Types of the attributes that say how a layer computes: `kernel_size`, `padding`, `nf`."""


class CompiledLayer(nn.Module):
    """Base of the layers that a compiled model has in the places of plain ones: for inference, nothing to prune.

    Attributes:
        name: Name of the layer in its model, for messages.
        placed: Device of what was prepared.
        weight_dtype: dtype of the weight in the model that was compiled.
        reads: Types of inputs that its kernels read.
        weight_names: What the layer calls its weights, which are no parameters of it.
    """

    name: str
    weight_names: tuple[str, ...] = ("weight",)
    placed: torch.device = torch.device("cpu")
    weight_dtype: torch.dtype = torch.float32
    reads: tuple[torch.dtype, ...] = (torch.float32,)

    def take_settings(self, module: nn.Module) -> None:
        """Answer for the settings of the module whose place it takes: forwards ask for `conv.stride`, as Whisper's."""
        for name, value in vars(module).items():
            if isinstance(value, SETTINGS) and not name.startswith("_") and name not in {*dir(self), "training"}:
                setattr(self, name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Do what `Module.to`, `half` or `share_memory` ask, but keep the dtype: kernels read what was prepared.

        Raises:
            LayerError: It would put the layer on another device, or its model in a type that its kernels do not read.
        """
        self.require_kept(fn)

        def kept(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            return found if found.dtype is tensor.dtype else tensor

        return cast(Any, super())._apply(kept, recurse)

    def require_kept(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse what `Module.to`, `half` and the like would make of the layer, with a bias or without.

        Raises:
            LayerError: As in `_apply`.
        """
        found = fn(torch.zeros(1, device=self.placed, dtype=self.weight_dtype))
        if found.device.type != self.placed.type:
            raise LayerError(
                "a compiled layer cannot be moved to another device",
                got=str(found.device),
                wanted=str(self.placed),
                remedy="leave a compiled model on the CPU, with its inputs; for what was moved before it: model.cpu()",
                layer=self.name,
            )
        if found.dtype not in (self.weight_dtype, *self.reads):
            raise LayerError(
                "a compiled layer cannot be put in another type",
                got=str(found.dtype),
                wanted=" or ".join(map(str, dict.fromkeys((self.weight_dtype, *self.reads)))),
                remedy='compile with dtype="bfloat16" or "int8" (transformers: TwoFourConfig(dtype=...)), or convert '
                "the model before that",
                layer=self.name,
            )


def apply_or_refuse(model: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Do as `Module._apply` of a compiled model; what one of its layers refuses changes none of it.

    Raises:
        LayerError: A layer refuses it.
    """
    for module in model.modules():
        if isinstance(module, CompiledLayer):
            module.require_kept(fn)
    return cast(Any, type(model))._apply(model, fn, recurse)


_COMPILED = "_compiled_by_twofour"


def mark_compiled(model: nn.Module, settings: object) -> None:
    """Note on a model what it was compiled with: it may have no `CompiledLayer` where torch's own are the fastest."""
    object.__setattr__(model, _COMPILED, settings)


def compilation(model: nn.Module) -> object:
    """Return what `mark_compiled` noted, None on a model that is not compiled."""
    return model.__dict__.get(_COMPILED)


def compiled_parts(model: nn.Module) -> str:
    """Return the names of a model's compiled layers, or of its compiled parts without any; "" where it is plain."""
    modules = list(named_modules(model))
    names = [f"`{name or '(model)'}`" for name, module in modules if isinstance(module, CompiledLayer)]
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"the compiled layers {', '.join(names[:8])}{more}"
    marked = [f"`{name}`" if name else "the model" for name, module in modules if _COMPILED in module.__dict__]
    return f"{', '.join(marked)} from twofour.compile, all layers torch's own" if marked else ""
