"""Whole layers that go: which may, and how the rest and what a configuration lists for each layer close up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from twofour.errors import ShrinkError
from twofour.layers.modules import named_modules

NUMBERS = ("layer_idx", "layer_id")
"""Attributes in which a layer of transformers holds its own number, for its cache."""

LISTED = ("layer", "block")
"""Parts of the names of what configurations of transformers list for each layer: `layer_types`, `no_rope_layers`,
`layers_block_type`. Other lists may have as many entries by chance."""


def require_layers(model: nn.Module, layers: Sequence[str]) -> None:
    """Refuse layers that are no entries of the model's lists and sequences of layers.

    Raises:
        ShrinkError: One is none.
    """
    modules = dict(named_modules(model, again=True))  # an entry may stand in a list twice
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
    """Take layers out of their lists; those that follow move up, and so do the numbers that they hold.

    What a configuration of transformers lists for each layer gets shorter too, since forwards look it up by the place
    in the list: Gemma 2 takes the mask of `config.layer_types[i]`.
    """
    gone: dict[str, set[str]] = {}
    for name in layers:
        parent, _, key = name.rpartition(".")
        gone.setdefault(parent, set()).add(key)
    containers = [(model.get_submodule(parent), keys) for parent, keys in gone.items()]  # before any of them is renamed
    configs = [_configs(model, parent) for parent in gone]
    for held, (container, keys) in zip(configs, containers, strict=True):
        for config in held:
            _say_fewer(config, len(container._modules), keys, undo)
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


def _configs(model: nn.Module, container: str) -> list[Any]:
    """Return the configurations of what runs a list of layers, and of its layers, each once."""
    parts = container.split(".")
    names = ["", *(".".join(parts[:end]) for end in range(1, len(parts) + 1))]
    modules = [*map(model.get_submodule, names), *model.get_submodule(container).modules()]
    held = [getattr(module, "config", None) for module in modules]
    return list({id(config): config for config in held if hasattr(config, "__dict__")}.values())


def _say_fewer(config: Any, before: int, keys: set[str], undo: list[Callable[[], None]]) -> None:
    """Let a configuration say fewer layers, where its number of layers is that of the list.

    One of an encoder and a decoder has two such numbers, and lists nothing for each: `configure` tells them apart.
    """
    said = vars(config)
    count = getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    if said.get("is_encoder_decoder") or type(said.get(count)) is not int or said[count] != before:
        return
    gone = {int(key) for key in keys if key.isdigit()}
    changes: dict[str, Any] = {count: before - len(gone)}
    for name, listed in said.items():
        if isinstance(listed, list | tuple) and len(listed) == before and any(word in name for word in LISTED):
            changes[name] = type(listed)(one for place, one in enumerate(listed) if place not in gone)
    undo.append(lambda old={name: said[name] for name in changes}: said.update(old))
    said.update(changes)


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
