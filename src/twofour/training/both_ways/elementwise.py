"""Whether an optimiser steps kept values as it would step the dense weight under its mask: tried on a copy of it.

What mixes values of a weight (rows in Adafactor, singular vectors in Muon, a mean that is subtracted from each row of
the gradient) gives other numbers where the pruned zeros are not there. Names tell some of those, and a trial tells the
rest before any real weight has moved: three steps of a small dense weight under a mask, and of its kept values.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from twofour.errors import TrainingError, cut
from twofour.packing import kept
from twofour.patterns import Transposable

ALONE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.Adagrad,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
"""torch's own that step every value by itself. Not their subclasses, which may do anything: those are tried."""
WHOLE = ("adafactor", "galore", "kron", "lbfgs", "muon", "shampoo", "soap")
"""Parts of the names of classes that are known not to, some of them only after steps that a trial would not reach."""
_ROWS, _COLUMNS, _STEPS = 64, 128, 3
_LIMIT = 1e-3
"""Largest difference, of the largest movement: sums in another order make 1e-6 of it."""


def require_elementwise(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse an optimiser that would not step these parameters as kept values like the dense weight under its mask.

    Raises:
        TrainingError: It mixes values, keeps state of another shape, or cannot be tried on a copy.
    """
    if type(optimizer) in ALONE:
        return
    names = [kind.__name__ for kind in type(optimizer).__mro__ if issubclass(kind, Optimizer)]
    if any(part in name.lower() for name in names for part in WHOLE):
        raise not_elementwise(optimizer, "a step that is not one of each value by itself")
    with torch.random.fork_rng(devices=[]):
        _try(optimizer, {id(parameter) for parameter in parameters})


def strange_state(state: Mapping[str, Any], shape: tuple[int, ...]) -> str:
    """Return what an optimiser keeps of one parameter that is neither a number nor a tensor of its shape, or ""."""
    for name, value in state.items():
        for depth, tensor in _tensors(value):
            if tensor.numel() > 1 and (depth or tuple(tensor.shape) != shape):
                return f"state `{name}` {tuple(tensor.shape)} of {shape}" + (" inside a container" if depth else "")
    return ""


def not_elementwise(optimizer: Optimizer, got: str) -> TrainingError:
    """Return the error that says so."""
    return TrainingError(
        f"{type(optimizer).__name__} cannot step kept values alone",
        got=got,
        wanted="an optimiser that steps every value by itself: SGD, Adam, AdamW, RMSprop, Adagrad, ...",
        remedy='both_ways.attach(..., state="dense"), which any optimiser steps',
    )


def _tensors(value: Any, depth: int = 0) -> Iterator[tuple[int, Tensor]]:
    if isinstance(value, Tensor):
        yield depth, value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one, depth + 1)


def _try(optimizer: Optimizer, mine: set[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    first, *gradients = torch.randn(1 + _STEPS, _ROWS, _COLUMNS, generator=generator, dtype=torch.float32, device="cpu")
    keep = Transposable().project(first, absolute=True)
    places = kept.places_of(keep)
    twin, ones = _twin(optimizer, mine, first * keep)
    other, others = _twin(optimizer, mine, kept.gather(places, first))
    for gradient in gradients:
        _step(optimizer, twin, ones, gradient * keep)
        _step(optimizer, other, others, kept.gather(places, gradient))
        with torch.no_grad():
            for one in ones:
                for value in (one, *(value for value in twin.state[one].values() if isinstance(value, Tensor))):
                    if value.shape == keep.shape:
                        value.mul_(keep)
    for one, half in zip(ones, others, strict=True):
        if strange := strange_state(other.state[half], tuple(half.shape)):
            raise not_elementwise(optimizer, strange)
        moved = float((half - kept.gather(places, first)).abs().max())
        error = float((kept.gather(places, one.detach()) - half).abs().max())
        if not moved > 0:
            raise not_elementwise(optimizer, "a step that moved nothing where it was tried on a copy")
        if not error <= _LIMIT * moved:
            raise not_elementwise(
                optimizer, f"a step that mixes values: tried on a copy, {error / moved:.2g} of it differs from dense"
            )


def _twin(optimizer: Optimizer, mine: set[int], value: Tensor) -> tuple[Optimizer, list[nn.Parameter]]:
    """Return a copy that steps one small parameter in each group with parameters of ours, and those parameters."""
    twin = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): twin, id(optimizer.state): defaultdict(dict)}
    ones = []
    for group in optimizer.param_groups:
        has = [parameter for parameter in group["params"] if id(parameter) in mine]
        one = nn.Parameter(value.clone() if has else torch.zeros((), dtype=torch.float32, device="cpu"))
        memo |= {id(parameter): one for parameter in group["params"]}
        memo[id(group["params"])] = [one] if has else []
        ones += [one] if has else []
    # A schedule counts the steps of the real one in `step`, and hooks are for the real one.
    held = {name: value for name, value in vars(optimizer).items() if name != "step" and not name.endswith("_hooks")}
    try:
        twin.__dict__.update(copy.deepcopy(held, memo))
    except Exception as error:
        raise not_elementwise(optimizer, f"one that cannot be tried on a copy: {cut(str(error), 80)}") from error
    twin.__dict__ |= {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    for group in twin.param_groups:
        if not float(group.get("lr", 1.0)):  # a warm-up starts there
            group["lr"] = float(group.get("initial_lr", 0.0)) or 1e-3
    return twin, ones


def _step(optimizer: Optimizer, twin: Optimizer, ones: list[nn.Parameter], gradient: Tensor) -> None:
    for one in ones:
        one.grad = gradient.clone()
    try:
        cast(Any, twin).step()
    except Exception as error:
        raise not_elementwise(optimizer, f"a step that cannot be tried on a copy: {cut(str(error), 80)}") from error
