"""A product whose answer holds both halves of a gated MLP has them multiplied in one native call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from twofour.graph.base import Rule, activation_name, argument, aten, calls, insert, replace_with, value
from twofour.kernels.activation import DTYPES, gated_activation

_ACTIVATIONS = (aten.relu.default, aten.gelu.default, aten.silu.default)
_NARROW = (torch.narrow, aten.narrow.default)


def rewrite(module: fx.GraphModule) -> int:
    """Replace activation(one half) * other half of the columns of a tensor; returns how many there are."""
    count = 0
    for node in calls(module.graph, aten.mul.Tensor):
        found = None if node.kwargs else _gate(*node.args) or _gate(*node.args[::-1])
        if found is None or value(node).dtype is not value(found[0]).dtype:
            continue
        replace_with(node, insert(node, gated_activation, found, node, label="gate"))
        count += 1
    module.graph.eliminate_dead_code()
    return count


def _gate(activated: Any, other: Any) -> tuple[fx.Node, str, bool] | None:
    """Return the tensor with both halves, the activation of one of them, and whether that is the second."""
    if getattr(activated, "target", None) not in _ACTIVATIONS or len(activated.users) > 1:
        return None
    first, second = _half(activated.args[0]), _half(other)
    if first is None or second is None or first[0] is not second[0] or first[1] is second[1]:
        return None
    return first[0], activation_name(activated), first[1]


def _half(node: Any) -> tuple[fx.Node, bool] | None:
    """Return of a half of a tensor's columns that tensor, and whether it is the second."""
    found = _columns(node)
    if found is None:
        return None
    source, axis, begin, size = found
    whole = value(source)
    if (
        not isinstance(whole, Tensor)
        or whole.dtype not in DTYPES
        or whole.ndim == 0
        or axis not in (-1, whole.ndim - 1)
    ):
        return None
    halves = isinstance(size, int) and whole.shape[-1] == 2 * size and begin in (0, size)
    return (source, begin != 0) if halves else None


def _columns(node: Any) -> tuple[Any, Any, Any, Any] | None:
    """Return what a view takes a part of, along which axis, where that begins and how much it is."""
    if getattr(node, "target", None) in _NARROW:
        return node.args
    if getattr(node, "target", None) is not aten.slice.Tensor or argument(node, 4, "step", 1) != 1:
        return None
    axis, begin = argument(node, 1, "dim", 0), argument(node, 2, "start") or 0
    return node.args[0], axis, begin, value(node).shape[axis]


GATES = Rule("gates of one product", rewrite)
