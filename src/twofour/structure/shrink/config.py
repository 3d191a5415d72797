"""configure: the sizes of a shrunk model of transformers in its configuration, so that `from_pretrained` builds it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls
from twofour.capture.call import is_hugging_face
from twofour.measure.distance import largest_difference
from twofour.structure.shrink.agreement import CLOSE
from twofour.structure.shrink.cut import Cut
from twofour.structure.shrink.sizes import is_known
from twofour.structure.shrink.surgery import cuts_of

UNSAID = ("n_inner",)
"""Numbers of a configuration that are None where the model takes a multiple of another: GPT-2's hidden width."""

Said = dict[str, tuple[int, ...] | int | float]


NO_CONFIGURATION = "it is no model of transformers"
"""What `configure` says of a model that has no configuration to change."""


def configure(model: nn.Module, example: Any = None) -> str:
    """Let the configuration of a model that was cut say its sizes, where it can.

    A configuration has one number for all layers, so layers of different widths cannot be said, nor heads whose width
    follows from the model's (BERT). Numbers that equal a size which changed, or divide it, are changed one after the
    other as long as more of an empty model becomes right: the shapes of its tensors, and the numbers that its modules
    hold. Half the heads and heads of half the width give the same shapes; the numbers tell them apart.

    Args:
        model: A small model of transformers; its `config` is changed in place, or stays as it is.
        example: Input of one forward pass, on which the model has to compute the same with the changed configuration.

    Returns:
        "" where `from_pretrained` builds the model from its configuration, else why not.
    """
    config = getattr(model, "config", None)
    if config is None or not is_hugging_face(model):
        return NO_CONFIGURATION
    wanted = _Wanted(model, config)
    said = copy.deepcopy(config)
    wrong = wanted.wrong(said)
    while wrong:
        fewer, best = _nearest(wanted, said, model)
        if len(fewer) >= len(wrong):
            name = wrong[0]
            return f"the configuration of {type(model).__name__} cannot say the size of `{name}`, or not for one layer"
        wrong, said = fewer, best
    before, given = dict(config.__dict__), None if example is None else calls.Example.of(example)
    wanted_outputs = [] if given is None else _answers(model, given)
    config.__dict__.update(said.__dict__)
    if given is not None and largest_difference(_answers(model, given), wanted_outputs) > CLOSE:
        config.__dict__.update(before)
        return f"{type(model).__name__} computes something else with the configuration that says its sizes"
    return ""


@torch.no_grad()
def _answers(model: nn.Module, example: calls.Example) -> list[Tensor]:
    with calls.evaluating(model), calls.without_cache(model):
        found = calls.output_leaves(example.run(model))
    return [leaf.clone() for leaf in found if isinstance(leaf, Tensor)]


class _Wanted:
    """What an empty model of the right configuration has: the small model's shapes, and the numbers of its modules."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        self.kind, self.said = type(model), _said(model)
        self.old = self._made(config) or {}
        self.before = {axis.size for plan in cuts_of(model) for axis in plan.axes}
        self.sizes = {
            name: {size for parameter in module.parameters() for size in parameter.shape}
            for name, module in model.named_modules()
        }

    def wrong(self, config: Any) -> list[str]:
        """Return what a model of a configuration has not, or has otherwise; all where there is no such model."""
        found = self._made(config)
        if found is None:
            return [*self.said, ""]
        return [name for name in {**self.said, **found} if not self._agree(name, self.said.get(name), found.get(name))]

    def numbers(self, wrong: Sequence[str]) -> int:
        """Count the numbers of modules among what is wrong."""
        return sum(not isinstance(self.said.get(name, ()), tuple) for name in wrong)

    def _made(self, config: Any) -> Said | None:
        try:
            with torch.device("meta"):
                return _said(self.kind(type(config).from_dict(config.to_dict())))  # which refuses what it cannot say
        except Exception:  # numbers that do not divide each other: every class says so in its own way
            return None

    def _agree(self, name: str, wanted: Any, found: Any) -> bool:
        if wanted == found or (isinstance(wanted, tuple) or isinstance(found, tuple)):
            return wanted == found
        if wanted is None or found is None:
            return True
        if isinstance(wanted, float):  # what the old configuration gives too was set by hand: a dropout of zero
            return found == self.old.get(name)
        # A number that no forward uses keeps a size which changed: `intermediate_size` of an MLP.
        return wanted in self.before and found in self.sizes[name.rpartition(".")[0]]


def _said(model: nn.Module) -> Said:
    """Return the shapes of a model's tensors and the numbers of modules that do not follow from them, by name."""
    found: Said = {name: tuple(t.shape) for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    for prefix, module in model.named_modules():
        held = {} if is_known(module) else module.__dict__
        found |= {f"{prefix}.{name}".lstrip("."): n for name, n in held.items() if type(n) in (int, float)}
    return found


def _nearest(wanted: _Wanted, config: Any, model: nn.Module) -> tuple[list[str], Any]:
    """Return the configuration next to one that leaves the least wrong, and what that is.

    Two numbers are changed at once where one alone puts numbers of modules wrong: heads and key heads have a ratio.
    """
    plans = cuts_of(model)
    now = wanted.numbers(wanted.wrong(config))
    changes = _changes(config, plans)
    singles = [{name: value} for name, value in sorted(changes)]
    fewer = _with_fewer_layers(config, plans, model)
    tried = [(wanted.wrong(option), option) for option in (*_changed(config, singles), *fewer)]
    best = min(tried, key=lambda pair: len(pair[0]), default=([*wanted.said, ""], config))
    if wanted.numbers(best[0]) <= now:
        return best
    pairs = [
        {a: x, b: y}
        for (a, x), (b, y) in itertools.combinations(sorted(changes), 2)
        if a != b and None not in (was := (getattr(config, a), getattr(config, b))) and x * was[1] == y * was[0]
    ]
    tried = [best, *((wanted.wrong(option), option) for option in _changed(config, pairs))]
    return min(tried, key=lambda pair: len(pair[0]))


def _changes(config: Any, plans: Sequence[Cut]) -> set[tuple[str, int]]:
    """Return the numbers that a cut may have changed, each with what it may be now."""
    numbers = {name: value for name, value in config.to_dict().items() if not name.endswith("_token_id")}
    changes: set[tuple[str, int]] = set()
    for before, after in {(axis.size, len(axis.kept)) for plan in plans for axis in plan.axes}:
        for name, value in numbers.items():
            if name in UNSAID and value is None:
                changes.add((name, after))
            elif type(value) is int and value > 1 and before % value == 0 and value * after % before == 0:
                changes.add((name, value * after // before))
    return changes


def _changed(config: Any, changes: Sequence[dict[str, int]]) -> Iterator[Any]:
    for change in changes:
        option = copy.deepcopy(config)
        for name, value in change.items():
            setattr(option, name, value)
        yield option


def _with_fewer_layers(config: Any, plans: Sequence[Cut], model: nn.Module) -> Iterator[Any]:
    """Yield configurations that say the layers which all plans left, where `cut` could not tell which number it is."""
    modules, gone = dict(model.named_modules()), dict[str, int]()
    for name in (name for plan in plans for name in plan.layers):
        parent, _, key = name.rpartition(".")
        gone[parent] = gone.get(parent, 0) + key.isdigit()
    for parent, count in gone.items():
        now = len(modules[parent]._modules) if parent in modules else 0
        for name, value in config.to_dict().items():
            if now and type(value) is int and value == now + count:
                yield from _changed(config, [{name: now}])
