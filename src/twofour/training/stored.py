"""Whether an optimiser's or a schedule's stored state is one that it could have written: told before it is used."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twofour.errors import cut
from twofour.layers import stored_shape

MOVED = ("lr", "momentum", "betas")
"""Settings of an optimiser that a schedule moves; the others are those of the interrupted run."""
MOST_STEPS = 1 << 53


def require_optimizer_state(optimizer: Optimizer, stored: Mapping[str, Any]) -> None:
    """Compare a stored state with that of the same optimiser after one step, of which no real weight sees anything.

    Args:
        optimizer: As it was at the start of the run, without state.
        stored: What its `state_dict` is said to have been.

    Raises:
        ValueError: A part is missing, of another shape, not finite or no number.
        KeyError: `stored` lacks "state" or "param_groups".
    """
    groups, states = stored["param_groups"], dict(stored["state"])
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(f"{len(groups)} groups of parameters, wanted {len(optimizer.param_groups)}")
    fresh: dict[tuple[Any, ...], dict[str, Any] | None] = {}
    for number, (group, kept) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        _require_settings(group, kept)
        if len(kept["params"]) != len(group["params"]):
            raise ValueError(f"{len(kept['params'])} parameters in a group, wanted {len(group['params'])}")
        for index, parameter in zip(kept["params"], group["params"], strict=True):
            found = states.pop(index, None)
            if not found:
                continue  # it has had no gradient yet
            kind = (number, stored_shape(parameter), parameter.dtype, parameter.device)
            if kind not in fresh:
                fresh[kind] = _after_one_step(optimizer, group, parameter)
            if (wanted := fresh[kind]) is not None:
                _require_like(f"state of parameter {index}", wanted, found)
    if states:
        raise ValueError(f"state of {len(states)} parameters that the optimiser does not hold")


def require_schedule_state(fresh: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Compare a schedule's stored state with that at its start: the same names, kinds and lengths, finite numbers.

    Raises:
        ValueError: They differ.
    """
    if stored.keys() != fresh.keys():  # loading takes any keys
        raise ValueError(f"a schedule's state with {', '.join(map(str, stored)) or 'nothing'}")
    _require_like("state of the schedule", fresh, stored)


def _after_one_step(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any] | None:
    """Return what the optimiser keeps of one parameter; None where it does not work parameter by parameter."""
    value, shape = parameter.detach(), stored_shape(parameter)
    one = nn.Parameter(torch.zeros_like(value) if shape == value.shape else value.new_zeros(shape))
    one.grad = torch.zeros_like(one.detach())
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a schedule counts the steps of the real one there
    twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": [one]}]
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        twin.step()
    except TypeError:  # LBFGS, which steps by a closure
        return None
    return dict(twin.state[one])


def _require_settings(group: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    for name, value in group.items():
        if name == "params":
            continue
        if name not in kept:
            raise ValueError(f"no setting `{name}` of the optimiser")
        _require_like(f"setting `{name}`", value, kept[name])
        if name not in MOVED and not isinstance(value, Tensor) and kept[name] != value:
            raise ValueError(f"setting `{name}` is {cut(repr(kept[name]), 40)}, wanted {cut(repr(value), 40)}")
        if name == "betas" and not all(0 <= float(beta) < 1 for beta in kept[name]):
            raise ValueError(f"setting `betas` is {cut(repr(kept[name]), 40)}")


def _require_like(what: str, wanted: Any, found: Any) -> None:
    """Compare kinds, shapes and lengths; a number may have any finite value. More names than wanted are no harm."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for name, value in wanted.items():
            if name not in found:
                raise ValueError(f"{what}: no `{name}`")
            _require_like(f"{what}, `{name}`", value, found[name])
            if name in ("step", "last_epoch", "_step_count") and not 0 <= float(found[name]) < MOST_STEPS:
                raise ValueError(f"{what}: `{name}` is {cut(repr(found[name]), 40)}")
    elif isinstance(wanted, Tensor):
        if not isinstance(found, Tensor) or found.shape != wanted.shape or not _same_kind(wanted, found):
            shown = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{what} is {shown}, wanted a tensor {tuple(wanted.shape)}, {wanted.dtype}")
        if not found.is_contiguous() and found.stride() != wanted.stride():
            raise ValueError(f"{what} has strides {found.stride()}, wanted {wanted.stride()}: values may share a place")
        if found.is_floating_point() and not bool(found.isfinite().all()):
            raise ValueError(f"{what} is not finite")
    elif isinstance(wanted, bool | str) or wanted is None:
        if type(found) is not type(wanted) and wanted is not None:
            raise ValueError(f"{what} is {cut(repr(found), 40)}, wanted something like {cut(repr(wanted), 40)}")
    elif isinstance(wanted, int | float):
        if type(found) is bool or not isinstance(found, int | float) or not math.isfinite(found):
            raise ValueError(f"{what} is {cut(repr(found), 40)}, wanted a finite number")
    elif isinstance(wanted, Sequence):
        if not isinstance(found, Sequence) or len(found) != len(wanted):
            raise ValueError(f"{what} is {cut(repr(found), 40)}, wanted {len(wanted)} values")
        for one, other in zip(wanted, found, strict=True):
            _require_like(what, one, other)


def _same_kind(wanted: Tensor, found: Tensor) -> bool:
    return found.is_floating_point() == wanted.is_floating_point() and found.layout == wanted.layout
