"""Which masked parameters an optimiser steps: looked up once, then held for as long as nothing shows a change.

A step of an optimiser without masked parameters compares the parameters it had with those it has, 17 ns each, and looks
at one counter, however many masked models live. The walk over all places comes with an optimiser's first step, with
other parameters in its groups, and after a change that `Changes` counts: a mask attached or let go, a copy, a parameter
assigned to a masked place.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twofour.layers import is_distributed
from twofour.masks import rule as rules
from twofour.masks.link import Changes, Link, living
from twofour.masks.loaded import reconcile
from twofour.masks.rule import Rule

_log = logging.getLogger("twofour.masks")

_SEEN = "_twofour_seen"
"""Attribute of an optimiser: its `_Seen`. A table beside it would keep an optimiser alive that hooks of its own
parameters hold."""


class Masked(NamedTuple):
    """A masked parameter that an optimiser steps, its rule, and its place; None once it has left that."""

    parameter: Tensor
    rule: Rule
    link: Link | None

    @property
    def keep(self) -> Tensor:
        """The mask, where the parameter is."""
        return self.rule.on(self.parameter)


class _Seen:
    """What was found for an optimiser, and what shows that it still holds. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self.change = -1
        self.groups: list[list[Tensor]] = []
        self.found: list[Masked] = []

    def holds(self, groups: Sequence[dict[str, Any]]) -> bool:
        if self.change != Changes.count or len(groups) != len(self.groups):
            return False
        for group, seen in zip(groups, self.groups, strict=True):
            now = group["params"]
            if len(now) != len(seen) or not all(map(is_, now, seen)):
                return False
        return all(link is None or link.standing() is parameter for parameter, _, link in self.found)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Seen, ()


def stepped(optimizer: Optimizer) -> list[Masked]:
    """Return the masked parameters that `optimizer` steps.

    A masked weight is looked at when an optimiser first meets it, since others may have written it: DDP its first
    process's. It then brings its own zeros, or is masked again.

    Raises:
        MaskError: A module whose parameters it steps has lost a masked one.
    """
    seen = optimizer.__dict__.get(_SEEN)
    if seen is not None and seen.holds(optimizer.param_groups):
        return seen.found
    before: set[int] = {id(masked.rule) for masked in seen.found} if seen is not None else set()
    fresh = _Seen()
    fresh.change, fresh.groups = Changes.count, [list(group["params"]) for group in optimizer.param_groups]
    fresh.found = _look_up([parameter for group in fresh.groups for parameter in group])
    for masked in fresh.found:
        _warn_homeless(masked)
        if id(masked.rule) not in before:
            _review(masked)
    optimizer.__dict__[_SEEN] = fresh
    return fresh.found


def looked_up(optimizer: Optimizer) -> list[Masked]:
    """Return the same after the step, without comparing the parameters again."""
    seen = optimizer.__dict__.get(_SEEN)
    return seen.found if seen is not None and seen.change == Changes.count else stepped(optimizer)


def _look_up(parameters: list[Tensor]) -> list[Masked]:
    """Walk over all places, settle them, and pick the parameters that obey a rule."""
    standing: dict[int, Link] = {}
    lost: list[Link] = []
    for link in living():
        parameter = link.settle()
        if parameter is None:
            lost.append(link)
        else:
            standing[id(parameter)] = link
    if lost:
        _refuse_lost(lost, parameters)
    found: list[Masked] = []
    for parameter in parameters:
        rule = rules.of_parameter(parameter)
        if rule is not None and parameter.shape == rule.keep.shape:
            found.append(Masked(parameter, rule, standing.get(id(parameter))))
    return found


def _refuse_lost(lost: Sequence[Link], parameters: Sequence[Tensor]) -> None:
    """Raise for a place without its parameter, if the parameters that are stepped are those of its module."""
    mine = {id(parameter) for parameter in parameters}
    flat = {
        id(info.module) for parameter in parameters for info in getattr(parameter, "_param_infos", ())
    }  # FSDP1: what it calls a FlatParameter knows the modules that it took its values from
    for link in lost:
        module = link.module
        if module is None:
            continue
        if id(module) in flat or any(id(parameter) in mine for parameter in module.parameters()):
            link.parameter()
    for parameter in parameters:
        rule = rules.of_parameter(parameter)
        if rule is not None and (link := next((link for link in lost if link.rule is rule), None)) is not None:
            link.parameter()


def _warn_homeless(masked: Masked) -> None:
    rule = masked.rule
    if masked.link is None and not rule.warned:
        rule.warned = True
        _log.warning(
            "`%s`: the parameter has left the module that it was masked in, and stands in none that is known to be "
            "masked; each step keeps it %s all the same. Assign it as a Parameter (module.weight = parameter) for its "
            "mask to come along, or build the optimiser anew if its module has another parameter now",
            rule.name,
            rule.pattern.name,
        )


@torch.no_grad()
def _review(masked: Masked) -> None:
    parameter, rule, _ = masked
    # What a sharded weight's parts are is for all processes to look at together, which a step is not.
    if isinstance(parameter, nn.Parameter) and not parameter.is_meta and not is_distributed(parameter):
        reconcile(rule, parameter)
