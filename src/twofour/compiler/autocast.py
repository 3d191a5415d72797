"""Calls of a whole compiled model inside of `torch.autocast`: they compute as outside of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from twofour.layers import CompiledLayer
from twofour.native.surroundings import HALVES, from_autocast, no_autocast


def in_own_type(model: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a call answers outside of autocast, on float32 in the places of what autocast made; else as it is.

    Args:
        model: The compiled model; an operand in a type that it holds tensors of stays.
        call: Its forward.
        args: Arguments; tensors, and those of tuples and lists, are looked at.
        kwargs: The same with names.
    """
    if not torch.is_autocast_enabled("cpu"):
        return call(*args, **kwargs)
    given = [_widened(model, value) for value in args]
    named = {name: _widened(model, value) for name, value in kwargs.items()}
    with no_autocast("cpu"):
        return call(*given, **named)


def _widened(model: nn.Module, value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_widened(model, one) for one in value)
    if isinstance(value, PackedSequence):
        return value._replace(data=_widened(model, value.data))
    if not isinstance(value, torch.Tensor) or value.dtype not in HALVES:
        return value
    made = from_autocast(value, (torch.float32, *_types(model)))
    return value if made is None else made


def _types(model: nn.Module) -> set[torch.dtype]:
    """Return the types of a model's tensors, of compiled layers those of the weights that were compiled."""
    found: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, CompiledLayer):
            found.add(module.weight_dtype)
        else:
            held = (*module._parameters.values(), *module._buffers.values())
            found |= {tensor.dtype for tensor in held if tensor is not None}
    return found
