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


MASKED = "_twofour_links"
"""Attribute of a masked module, in which `masks` keeps what holds there; it goes along with copies and pickles."""


def is_masked(module: nn.Module) -> bool:
    """Return whether a parameter of the module itself is under a mask."""
    return bool(module.__dict__.get(MASKED))


ATTACHED = "twofour_attached"
"""Attribute of a class that takes a layer's place for a while without touching its weights: what it is called."""


def attached(module: nn.Module) -> str:
    """Return what has put a class of its own over a layer, "" where nothing has; copies of a model keep theirs."""
    return getattr(type(module), ATTACHED, "")


def schemes(model: nn.Module) -> dict[str, str]:
    """Return the training schemes at work in a model by the names of their layers."""
    return {
        name or "(model)": _HELD[module][0]
        for name, module in model.named_modules()
        if module in _HELD and _HELD[module][1]() is not None
    }


def describe_schemes(model: nn.Module) -> str:
    """Return the training schemes at work in a model and their layers in words, "" where there are none."""
    return _described(schemes(model))


def describe_attached(model: nn.Module) -> str:
    """Return the same, and what else is attached (`ATTACHED`): what must go before weights are exchanged."""
    over = {name or "(model)": title for name, module in model.named_modules() if (title := attached(module))}
    return "; ".join(filter(None, (_described(schemes(model)), _described(over))))


def _described(found: dict[str, str]) -> str:
    texts = []
    for scheme in dict.fromkeys(found.values()):
        names = [f"`{name}`" for name, held in found.items() if held == scheme]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        texts.append(f"{scheme} on {', '.join(names[:4])}{more}")
    return "; ".join(texts)
