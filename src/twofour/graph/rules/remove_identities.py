"""What computes nothing: dropout outside training, conversions to the type a tensor has, whole slices, checks."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, fx

from twofour.graph.base import (
    Rule,
    argument,
    aten,
    calls,
    escapes,
    named_argument,
    replace_with,
    same_size,
    value,
)

_ALWAYS = (
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.lift_fresh_copy.default,
)
_CASTS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
    aten._to_copy.default,
)
_RESHAPES = (aten.view.default, aten.reshape.default, aten.expand.default, aten._unsafe_view.default)
_FRESH = (aten.lift_fresh_copy.default, aten._to_copy.default, aten.clone.default, aten.add.Tensor)
_PADS = (aten.pad.default, aten.constant_pad_nd.default)
_COPIES = (aten.contiguous.default, aten.clone.default)


def rewrite(module: fx.GraphModule) -> int:
    """Remove nodes whose answer is their first argument."""
    graph, count = module.graph, 0
    for node in calls(graph, aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node) and _nothing(node):
            replace_with(node, node.args[0])
            count += 1
    return count


def _nothing(node: fx.Node) -> bool:
    source: Any = node.args[0]
    x, y = value(source), value(node)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dtype != y.dtype:
        return False
    target = node.target
    if (target in (*_FRESH, *_PADS) or named_argument(node, "copy")) and escapes(node):
        return False  # the caller may change what it gets, not the model's constant or its own input
    if target in _CASTS and named_argument(node, "memory_format") not in (None, torch.preserve_format):
        return False
    if target in _ALWAYS or target in _CASTS:
        return x.device == y.device
    if target in (aten.dropout.default, aten.feature_dropout.default):
        return argument(node, 2, "train") is False
    if target in _RESHAPES:
        return same_size(source, node)
    if target in _COPIES:
        return x.is_contiguous() and source.op != "placeholder"
    if target in _PADS:
        return all(isinstance(size, int) and size == 0 for size in node.args[1])  # pyright: ignore
    if target is aten.slice.Tensor:
        start, end, step = argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
        return start in (None, 0) and end in (None, sys.maxsize) and step == 1
    if target is aten.add.Tensor:
        return isinstance(node.args[1], int | float) and node.args[1] == 0 and same_size(source, node)
    return False


IDENTITIES = Rule("identities removed", rewrite)
