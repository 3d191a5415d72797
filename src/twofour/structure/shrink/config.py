"""configure: the sizes of a shrunk model of transformers in its configuration, so that `from_pretrained` builds it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twofour.capture.call import is_hugging_face
from twofour.structure.shrink.cut import Cut
from twofour.structure.shrink.surgery import cuts_of

UNSAID = ("n_inner",)
"""Numbers of a configuration that are None where the model takes a multiple of another: GPT-2's hidden width."""

Shapes = dict[str, tuple[int, ...]]


def configure(model: nn.Module) -> str:
    """Let the configuration of a model that was cut say its sizes, where it can.

    A configuration has one number for all layers, so layers of different widths cannot be said, nor heads whose width
    follows from the model's (BERT). Numbers that equal a size which changed, or divide it, are changed one after the
    other as long as more tensors of an empty model get the right shapes.

    Args:
        model: A small model of transformers; its `config` is changed in place, or stays as it is.

    Returns:
        "" where `from_pretrained` builds the model from its configuration, else why not.
    """
    config = getattr(model, "config", None)
    if config is None or not is_hugging_face(model):
        return "it is no model of transformers"
    plans = cuts_of(model)
    wanted = {name: tuple(t.shape) for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    said = copy.deepcopy(config)
    wrong = _wrong(type(model), said, wanted)
    while wrong:
        tried = [(_wrong(type(model), option, wanted), option) for option in _options(said, plans, model)]
        best = min(tried, key=lambda pair: len(pair[0]), default=(wrong, said))
        if len(best[0]) >= len(wrong):
            name = wrong[0]
            return f"the configuration of {type(model).__name__} cannot say the size of `{name}`, or not for one layer"
        wrong, said = best
    config.__dict__.update(said.__dict__)
    return ""


def _wrong(kind: type[nn.Module], config: Any, wanted: Shapes) -> list[str]:
    """Return the tensors that an empty model of a configuration has not, or has in other shapes; all where none is."""
    try:
        with torch.device("meta"):
            made = kind(copy.deepcopy(config))
    except Exception:  # numbers that do not divide each other: every class says so in its own way
        return [*wanted, ""]
    found = {name: tuple(t.shape) for name, t in made.state_dict().items() if isinstance(t, Tensor)}
    return [name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)]


def _options(config: Any, plans: Sequence[Cut], model: nn.Module) -> Iterator[Any]:
    """Yield the configurations that differ in one number, as a cut may have changed it."""
    numbers = {name: value for name, value in config.to_dict().items() if not name.endswith("_token_id")}
    changes: set[tuple[str, int]] = set()
    for before, after in {(axis.size, len(axis.kept)) for plan in plans for axis in plan.axes}:
        for name, value in numbers.items():
            if name in UNSAID and value is None:
                changes.add((name, after))
            elif type(value) is int and value > 1 and before % value == 0 and value * after % before == 0:
                changes.add((name, value * after // before))
    for name, value in sorted(changes):
        option = copy.deepcopy(config)
        setattr(option, name, value)
        yield option
    for plan in plans:
        yield from _with_fewer_layers(config, plan, model)


def _with_fewer_layers(config: Any, plan: Cut, model: nn.Module) -> Iterator[Any]:
    """Yield configurations that say fewer layers, with what they list for each layer shortened."""
    gone: dict[str, set[int]] = {}
    for name in plan.layers:
        parent, _, key = name.rpartition(".")
        if key.isdigit():
            gone.setdefault(parent, set()).add(int(key))
    for parent, indices in gone.items():
        before = len(model.get_submodule(parent)._modules) + len(indices)
        for name, value in config.to_dict().items():
            if type(value) is int and value == before:
                option = copy.deepcopy(config)
                for other, listed in config.to_dict().items():
                    if isinstance(listed, list) and len(listed) == before:
                        setattr(option, other, [one for i, one in enumerate(listed) if i not in indices])
                setattr(option, name, before - len(indices))
                yield option
