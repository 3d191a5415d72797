"""What a compiled model is known by."""

from __future__ import annotations

from torch import nn


class CompiledLayer(nn.Module):
    """Base of the layers that a compiled model has in the places of plain ones: for inference, nothing to prune."""


_COMPILED = "_compiled_by_twofour"


def mark_compiled(model: nn.Module) -> None:
    """Note on a model that it is compiled: it may have no `CompiledLayer` where torch's own layers are the fastest."""
    object.__setattr__(model, _COMPILED, True)


def compiled_parts(model: nn.Module) -> str:
    """Return the names of a model's compiled layers, or of its compiled parts without any; "" where it is plain."""
    modules = list(model.named_modules())
    names = [f"`{name or '(model)'}`" for name, module in modules if isinstance(module, CompiledLayer)]
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"the compiled layers {', '.join(names[:8])}{more}"
    marked = [f"`{name}`" if name else "the model" for name, module in modules if _COMPILED in module.__dict__]
    return f"{', '.join(marked)} from twofour.compile, all layers torch's own" if marked else ""
