"""What every optimiser's step does to parameters that products read packed, whoever holds a handle.

Copies and unpickled models have no handle, and one may be dropped. So a layer notes its parameter when it reads it,
and hooks of the process look it up at each step. Fused optimisers write without counting the parameter's version up,
by which layouts are known to be old: it is done for them.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache, partial
from typing import Any, Protocol, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from twofour.packing import Packed
from twofour.training.both_ways.kept_states import KeptStates


class Reader(Protocol):
    """Who reads a parameter.

    Attributes:
        places: Where the values stand that the parameter holds alone; None: it is dense.
    """

    places: Packed | None

    def settle(self, parameter: Tensor) -> None:
        """Have the parameter hold what was written elsewhere."""
        ...


STATES = KeptStates()
"""What all optimisers of the process remember of kept values."""
_read: MutableMapping[Tensor, ReferenceType[Reader]] = WeakTensorKeyDictionary()


def watch(parameter: Tensor, reader: Reader) -> None:
    """Have optimisers' steps of a parameter seen by what reads it, until either is gone."""
    known = _read.get(parameter)
    if known is None or known() is not reader:
        install()
        _read[parameter] = ref(reader)


def watched_by(reader: Reader) -> nn.Parameter | None:
    """Return the parameter that a reader watches, if there still is one."""
    found = (parameter for parameter, known in _read.items() if known() is reader)
    return next((parameter for parameter in found if isinstance(parameter, nn.Parameter)), None)


@cache
def install() -> None:
    """Register the hooks, once per process."""
    untraced = partial(cast(Any, torch.compiler).disable, reason="twofour both ways: looks parameters up while it runs")
    register_optimizer_step_pre_hook(untraced(_before_step))
    register_optimizer_step_post_hook(untraced(_after_step))


@torch.no_grad()
def _stepped(optimizer: Optimizer) -> dict[nn.Parameter, Packed | None]:
    """Return the parameters of an optimiser that somebody reads, each with the places of kept values."""
    if not _read:
        return {}
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            known = _read.get(parameter)
            if known is not None and (reader := known()) is not None:
                reader.settle(parameter)
                found[parameter] = reader.places
    return found


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = {parameter: places for parameter, places in _stepped(optimizer).items() if places is not None}
    STATES.before_step(optimizer, held)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = _stepped(optimizer)
    if stepped:
        torch.autograd.graph.increment_version(list(stepped))
    STATES.after_step(optimizer, {parameter: places for parameter, places in stepped.items() if places is not None})
