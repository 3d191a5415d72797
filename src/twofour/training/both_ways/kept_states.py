"""What optimisers remember of parameters that hold kept values alone.

State of a parameter's shape is held as the parameter is, half of the dense one, and is dense wherever it is shown: in
`optimizer.state_dict()`, and again once the parameter is dense. Dense state that was there before, or was loaded, is
gathered before the next step. So a checkpoint of a packed run goes on in a dense one and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from twofour.errors import TrainingError
from twofour.layers import stored_shape
from twofour.packing import Packed
from twofour.training.both_ways.kept_linear import moved

WHOLE = ("Adafactor", "LBFGS", "Muon", "SOAP", "Shampoo")
"""Classes of optimisers whose step mixes values of a weight by row and column, or keeps no state of its shape."""

Places = dict[nn.Parameter, Packed]


class KeptStates:
    """The optimisers that have stepped such parameters, and by which places their state stands."""

    def __init__(self) -> None:
        self._stands: WeakKeyDictionary[Optimizer, Places] = WeakKeyDictionary()
        self._hooks: list[RemovableHandle] = []

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, places: Mapping[nn.Parameter, Packed]) -> None:
        """Have the state of these parameters stand at their places.

        Raises:
            TrainingError: The optimiser does not step every value by itself.
        """
        if not places:
            return
        require_alone()
        _require_elementwise(optimizer)
        if optimizer not in self._stands:
            self._stands[optimizer] = {}
            self._hooks.append(optimizer.register_state_dict_post_hook(self._dense))
        stands = self._stands[optimizer]
        for parameter, at in places.items():
            before = stands.get(parameter)
            dense = _of_shape(optimizer, parameter, stored_shape(parameter))
            held = [] if before is None or before is at else _of_shape(optimizer, parameter, parameter.shape)
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
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                    raise _not_elementwise(
                        optimizer, f"state `{name}` {tuple(value.shape)} of {tuple(parameter.shape)}"
                    )

    @torch.no_grad()
    def release(self) -> None:
        """Make all state dense: the parameters are about to be."""
        for optimizer, stands in self._stands.items():
            for parameter, at in stands.items():
                for name, value in _of_shape(optimizer, parameter, parameter.shape):
                    optimizer.state[parameter][name] = moved(value, at, None)
        for hook in self._hooks:
            hook.remove()
        self._stands, self._hooks = WeakKeyDictionary(), []

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


def require_alone() -> None:
    """Refuse several processes: masks that differ from one to the next would not show in the values that they exchange.

    Raises:
        TrainingError: There are several.
    """
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        raise TrainingError(
            "kept values alone are not trained by several processes yet",
            got=f"{group.get_world_size()} processes",
            wanted="one, since whether all have the same masks is not looked at",
            remedy='both_ways.attach(..., state="dense")',
        )


def _of_shape(optimizer: Optimizer, parameter: nn.Parameter, shape: tuple[int, ...]) -> list[tuple[str, Tensor]]:
    state = optimizer.state.get(parameter, {})
    return [(name, value) for name, value in state.items() if isinstance(value, Tensor) and value.shape == shape]


def _require_elementwise(optimizer: Optimizer) -> None:
    if any(kind.__name__ in WHOLE for kind in type(optimizer).__mro__):
        raise _not_elementwise(optimizer, "a step that is not one of each value by itself")


def _not_elementwise(optimizer: Optimizer, got: str) -> TrainingError:
    return TrainingError(
        f"{type(optimizer).__name__} cannot step kept values alone",
        got=got,
        wanted="an optimiser that steps every value by itself: SGD, Adam, AdamW, RMSprop, Adagrad, ...",
        remedy='both_ways.attach(..., state="dense"), which any optimiser steps',
    )
