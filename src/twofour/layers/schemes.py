"""Weights that a training scheme works on: what else would change them asks here first."""

from __future__ import annotations

from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn

# Not in the modules: a copy of a model is not under the scheme of the original, and a reference would not pickle.
_HELD: WeakKeyDictionary[nn.Module, tuple[str, ReferenceType[object]]] = WeakKeyDictionary()


def hold(module: nn.Module, scheme: str, by: object) -> None:
    """Note that a training scheme works on the weights of a module, until `let_go` or until `by` is gone."""
    _HELD[module] = scheme, ref(by)


def let_go(module: nn.Module, by: object) -> None:
    """Undo `hold`, unless another scheme has taken over."""
    if module in _HELD and _HELD[module][1]() is by:
        del _HELD[module]


def schemes(model: nn.Module) -> dict[str, str]:
    """Return the training schemes at work in a model by the names of their layers."""
    return {
        name or "(model)": _HELD[module][0]
        for name, module in model.named_modules()
        if module in _HELD and _HELD[module][1]() is not None
    }


def describe_schemes(model: nn.Module) -> str:
    """Return the training schemes at work in a model and their layers in words, "" where there are none."""
    found = schemes(model)
    texts = []
    for scheme in dict.fromkeys(found.values()):
        names = [f"`{name}`" for name, held in found.items() if held == scheme]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        texts.append(f"{scheme} on {', '.join(names[:4])}{more}")
    return "; ".join(texts)
