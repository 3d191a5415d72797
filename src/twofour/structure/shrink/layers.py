"""Whole layers that go: which may, and how the rest closes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from twofour.errors import ShrinkError

NUMBERS = ("layer_idx", "layer_id")
"""Attributes in which a layer of transformers holds its own number, for its cache."""


def require_layers(model: nn.Module, layers: Sequence[str]) -> None:
    """Refuse layers that are no entries of the model's lists and sequences of layers.

    Raises:
        ShrinkError: One is none.
    """
    modules = dict(model.named_modules())
    for name in layers:
        parent = modules.get(name.rpartition(".")[0]) if name in modules else None
        if not isinstance(parent, nn.ModuleList | nn.Sequential):
            raise ShrinkError(
                "the layer cannot be dropped",
                got="a module that the model lacks" if parent is None else f"a part of a {type(parent).__name__}",
                wanted="an entry of an nn.ModuleList or nn.Sequential",
                remedy="name whole blocks, such as `encoder.layer.3`",
                layer=name,
            )
        if any(name.startswith(f"{other}.") for other in layers):
            raise ShrinkError(
                "the layer is a part of another one that is dropped",
                got=f"{len(layers)} layers",
                wanted="layers apart from each other",
                remedy="name the outer layer alone",
                layer=name,
            )


def drop(model: nn.Module, layers: Sequence[str], undo: list[Callable[[], None]]) -> None:
    """Take layers out of their lists; those that follow move up, and so do the numbers that they hold."""
    gone: dict[str, set[str]] = {}
    for name in layers:
        parent, _, key = name.rpartition(".")
        gone.setdefault(parent, set()).add(key)
    containers = [(model.get_submodule(parent), keys) for parent, keys in gone.items()]  # before any of them is renamed
    for container, keys in containers:
        _drop_from(container, keys, undo)


def renamed(name: str, layers: Sequence[str]) -> str | None:
    """Return what a module is called once layers went and those that follow moved up; None where it went with them."""
    parts = tuple(name.split("."))
    gone = {tuple(layer.split(".")) for layer in layers}
    if any(parts[:end] in gone for end in range(1, len(parts) + 1)):
        return None
    moved = [
        sum(layer[:-1] == parts[:place] and layer[-1].isdigit() and int(layer[-1]) < int(key) for layer in gone)
        if key.isdigit()
        else 0
        for place, key in enumerate(parts)
    ]
    return ".".join(str(int(key) - by) if by else key for key, by in zip(parts, moved, strict=True))


def _drop_from(container: nn.Module, keys: set[str], undo: list[Callable[[], None]]) -> None:
    before = dict(container._modules)
    numbered = list(before) == [str(index) for index in range(len(before))]
    stay = [(key, module) for key, module in before.items() if key not in keys]
    undo.append(lambda: _hold(container, before))
    _hold(container, {str(index) if numbered else key: module for index, (key, module) in enumerate(stay)})
    for index, (key, module) in enumerate(stay):
        for part in module.modules() if numbered and module is not None else ():
            for name in NUMBERS:
                if part.__dict__.get(name) == int(key) != index:
                    undo.append(lambda p=part, n=name, k=int(key): setattr(p, n, k))
                    setattr(part, name, index)


def _hold(container: nn.Module, modules: dict[str, Any]) -> None:
    container._modules.clear()
    container._modules.update(modules)
