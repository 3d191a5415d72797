"""What optimisers remember of parameters that hold kept values alone.

State of a parameter's shape is held as the parameter is, half of the dense one, and is dense wherever it is shown: in
`optimizer.state_dict()`, and again once the parameter is dense. Dense state that was there before, or was loaded, is
gathered before the next step. So a checkpoint of a packed run goes on in a dense one and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from twofour.errors import TrainingError
from twofour.packing import Packed, kept
from twofour.training.both_ways.elementwise import not_elementwise, require_elementwise, strange_state

Places = dict[nn.Parameter, Packed]


class KeptStates:
    """The optimisers that have stepped such parameters, and by which places their state stands."""

    def __init__(self) -> None:
        self._stands: WeakKeyDictionary[Optimizer, Places] = WeakKeyDictionary()
        self._moved: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()

    def note_moved(self, parameter: nn.Parameter) -> None:
        """Remember that a parameter's values stand at other places than before."""
        self._moved[parameter] = True

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, places: Mapping[nn.Parameter, Packed]) -> None:
        """Have the state of these parameters stand at their places.

        Raises:
            TrainingError: The optimiser does not step every value by itself.
        """
        if not places:
            return
        require_alone()
        if optimizer not in self._stands or not places.keys() <= self._stands[optimizer].keys():
            require_elementwise(optimizer, places)
        if optimizer not in self._stands:
            self._stands[optimizer] = {}
            optimizer.register_state_dict_post_hook(self._dense)
        stands = self._stands[optimizer]
        for parameter, at in places.items():
            before = stands.get(parameter)
            dense = _of_shape(optimizer, parameter, at.header.shape)
            held = [] if before is at else _of_shape(optimizer, parameter, parameter.shape)
            if held and before is None and parameter in self._moved:
                raise TrainingError(
                    "where an optimiser's state of kept values stands is not known",
                    got=f"a copy of a {type(optimizer).__name__} that has not stepped, and a mask that moved since",
                    wanted="an optimiser that has stepped these parameters, or the state_dict() of one that has",
                    remedy="load the model's new weights before copying, or load_state_dict the original's state",
                )
            held = [] if before is None else held
            for name, value in dense:
                optimizer.state[parameter][name] = moved(value, None, at)
            for name, value in held:
                optimizer.state[parameter][name] = moved(value, before, at)
            stands[parameter] = at

    def after_step(self, optimizer: Optimizer, places: Mapping[nn.Parameter, Packed]) -> None:
        """Look at the state that a step has made.

        Raises:
            TrainingError: Some of it is of another shape than the parameter.
        """
        for parameter in places:
            if strange := strange_state(optimizer.state.get(parameter, {}), tuple(parameter.shape)):
                raise not_elementwise(optimizer, strange)

    @torch.no_grad()
    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make all state of these parameters dense: they are about to be."""
        for parameter in parameters:
            for optimizer, stands in self._stands.items():
                if (at := stands.pop(parameter, None)) is not None:
                    for name, value in _of_shape(optimizer, parameter, parameter.shape):
                        optimizer.state[parameter][name] = moved(value, at, None)

    def _dense(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with dense state: a hook of the optimiser."""
        stands, state = self._stands.get(optimizer, {}), dict(state_dict["state"])
        for group, stored in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], stored["params"], strict=True):
                if parameter in stands and index in state:
                    at = stands[parameter]
                    held = _of_shape(optimizer, parameter, parameter.shape)
                    state[index] = {**state[index], **{name: moved(value, at, None) for name, value in held}}
        return {**state_dict, "state": state}


def processes() -> int:
    """Return how many processes train together."""
    group = torch.distributed
    return group.get_world_size() if group.is_available() and group.is_initialized() else 1


def require_alone() -> None:
    """Refuse several processes: masks that differ from one to the next would not show in the values that they exchange.

    Raises:
        TrainingError: There are several.
    """
    if (count := processes()) > 1:
        raise TrainingError(
            "kept values alone are not trained by several processes yet",
            got=f"{count} processes",
            wanted="one, since whether all have the same masks is not looked at",
            remedy='both_ways.attach(..., state="dense")',
        )


def require_same_masks() -> None:
    """Refuse several processes of which each has measured, alone, which of its layers have masks.

    Raises:
        TrainingError: There are several.
    """
    if (count := processes()) > 1:
        raise TrainingError(
            "layers may have masks in one process and none in another",
            got=f"{count} processes, and an attach before torch.distributed.init_process_group, which measured alone",
            wanted="the group first: all of its layers have masks then",
            remedy='attach after init_process_group, load one state_dict() in all, or attach(kernels="sparse")',
        )


def _of_shape(optimizer: Optimizer, parameter: nn.Parameter, shape: tuple[int, ...]) -> list[tuple[str, Tensor]]:
    state = optimizer.state.get(parameter, {})
    return [(name, value) for name, value in state.items() if isinstance(value, Tensor) and value.shape == shape]


def moved(tensor: Tensor, before: Packed | None, after: Packed | None) -> Tensor:
    """Return values that stand at `before`, or dense where that is None, as they stand at `after`."""
    dense = tensor if before is None else kept.scatter(replace(before, values=tensor))
    return dense if after is None else kept.gather(after, dense)
