"""What a captured graph took from its model: what is changed later in the model is not in the graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from twofour import native

TRAINING, HOOKS, CHANGED = 1, 2, 4
"""What `Held.look` sees: a module in training mode, a filled mapping of hooks, something that `Held.changed` names."""

_version, _training = attrgetter("_version"), itemgetter("training")
_PLAIN = (Tensor, nn.Parameter)


class Held:
    """The modules, parameters and buffers of a model at one moment, by identity, and how often they were written to.

    Each call of a graph asks whether anything is different, by `look`, which is native (`held.cc`); `training` and
    `changed` find out by name, and are its reference. What is written through `.data` or numpy leaves no trace and is
    not seen.

    Args:
        model: Any module; nothing of it is copied.
        hooks: Mappings in which torch keeps hooks.
    """

    def __init__(self, model: nn.Module, hooks: Iterable[Mapping[int, Any]] = ()) -> None:
        named = [(name, held) for name, module in model.named_modules() for held in _places(module) if held]
        self._prefixes, self._places = [name for name, _ in named], [held for _, held in named]
        self._modes = {name: vars(module) for name, module in model.named_modules()}
        self._states = [*self._modes.values()]
        self._names = self._listed()
        self._values = [*self._present()]
        # a stand-in for a packed weight refuses writes by itself; inference tensors count none
        self._written = [(n, v) for n, v in zip(self._names, self._values, strict=True) if _counts(v)]
        self._tensors = [value for _, value in self._written]
        self._versions = [*map(_version, self._tensors)]
        native_held = native.extension().HeldState
        self._native = native_held(self._states, list(hooks), self._places, self._values, self._tensors)

    def look(self) -> int:
        """Return what is to be seen now, of `TRAINING`, `HOOKS` and `CHANGED`; 0: all is as it was."""
        return self._native.look()

    def training(self) -> str:
        """Return the name of a module that is in training mode, as one for Monte Carlo dropout, "" where none is."""
        if not any(map(_training, self._states)):
            return ""
        return next(name for name, held in self._modes.items() if held["training"])

    def changed(self) -> str:
        """Return the name of something that was replaced, removed, added or written to since, "" where nothing was."""
        alike = sum(map(len, self._places)) == len(self._values)
        if not alike or not all(map(is_, self._present(), self._values)):
            before, now = dict(zip(self._names, map(id, self._values), strict=True)), self._listed()
            after = {name: id(value) for name, value in zip(now, self._present(), strict=True)}
            return next(name for name in (*before, *after) if before.get(name) != after.get(name))
        if [*map(_version, self._tensors)] != self._versions:
            pairs = zip(self._written, self._versions, strict=True)
            return next(name for (name, value), version in pairs if value._version != version)
        return ""

    def _present(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._places))

    def _listed(self) -> list[str]:
        pairs = zip(self._prefixes, self._places, strict=True)
        return [f"{name}.{key}".lstrip(".") for name, held in pairs for key in held]


def _places(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the mappings in which torch keeps what a module holds: assignment fills the same ones."""
    return module._parameters, module._buffers, module._modules


def _counts(value: Any) -> bool:
    return type(value) in _PLAIN and not torch.is_inference(value)
