"""Attention reads the columns of joined products itself: no views before it, no joining of heads behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from twofour.graph.base import Rule, argument, aten, calls, insert, replace_with, same_axes, swaps_heads, value
from twofour.kernels.attention import attention, attention_of_columns

_SPLITS = (aten.view.default, aten.reshape.default, aten.unflatten.int)
_COPIES = (aten.contiguous.default, aten.clone.default)
_JOINS = (aten.view.default, aten.reshape.default, aten.flatten.using_ints)


def rewrite(module: fx.GraphModule) -> int:
    """Replace attention between a splitting into heads and their joining; wanted after products have their kernels."""
    count = 0
    for node in calls(module.graph, attention):
        if argument(node, 6, "k_added") is not None:
            continue
        operands = [columns_of(operand) for operand in node.args[:3]]
        last = _joined(node)
        if last is None or any(found is None for found in operands):
            continue
        width = value(node).shape[-1]
        sources, begins, sizes = zip(*(found for found in operands if found is not None), strict=True)
        heads = isinstance(width, int) and all(isinstance(size, int) and size % width == 0 for size in sizes)
        if not heads or value(node.args[0]).shape[-1] != width or not same_axes(value(last).shape[-1:], sizes[:1]):
            continue
        rest = argument(node, 8, "unseen", 0.0), *node.args[9:11]  # of an answer in bytes their range
        args = *sources, begins, sizes, width, *node.args[3:6], *rest
        new = insert(last, attention_of_columns, args, last, label="attention")
        replace_with(last, new)
        count += 1
    module.graph.eliminate_dead_code()
    return count


def columns_of(operand: Any) -> tuple[fx.Node, int, int] | None:
    """Return the tensor (batch, length, columns) an operand is made of, its first column there and their number."""
    while isinstance(operand, fx.Node) and operand.target in _COPIES:
        operand = operand.args[0]  # attention reads what the copy was made of
    if not swaps_heads(operand):
        return None
    split: Any = operand.args[0]
    if not isinstance(split, fx.Node) or split.target not in _SPLITS or value(split).ndim != 4:
        return None
    source: Any = split.args[0]
    whole, parts = value(source), value(split)
    if whole.ndim != 3 or not same_axes(whole.shape[:2], parts.shape[:2]):
        return None
    if source.target in (torch.narrow, aten.narrow.default) and source.args[1] in (-1, 2):
        return source.args[0], source.args[2], source.args[3]
    return (source, 0, whole.shape[-1]) if isinstance(whole.shape[-1], int) else None


def _joined(node: fx.Node) -> fx.Node | None:
    """Return the node that joins the heads again, the only reader of the answer."""
    reader: Any = _only_reader(node)
    if not swaps_heads(reader):
        return None
    last = _only_reader(reader)
    if last is not None and last.target in _COPIES:
        last = _only_reader(last)
    if last is None or last.target not in _JOINS:
        return None
    shape, before = value(last).shape, value(reader).shape
    return last if len(shape) == 3 and same_axes(shape[:2], before[:2]) else None


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


FUSE_HEADS = Rule("heads read in place", rewrite)
