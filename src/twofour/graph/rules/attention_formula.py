"""Attention written out as products and a softmax, as models with eager attention are exported, becomes ours.

A query that sees no key is NaN there, 0 in torch's attention operator: it stays NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from twofour.graph.base import (
    Rule,
    argument,
    aten,
    calls,
    insert,
    is_float32,
    replace_with,
    same_axes,
    same_size,
    value,
)
from twofour.kernels.attention import attention

_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_ADD = aten.add.Tensor


def rewrite(module: fx.GraphModule) -> int:
    """Replace softmax(scale q k^T + masks) v of four axes; scores or weights that something else reads stay."""
    count, sums = 0, dict[tuple[Any, ...], fx.Node]()
    for node in calls(module.graph, aten.matmul.default):
        weights, v = node.args
        scores = _normalised(weights)
        if scores is None:
            continue
        scores, masks = _without_masks(scores)
        product, scale = _without_factor(scores)
        if not _is_product(product):
            continue
        q, by_query = _without_factor(product.args[0])
        keys, by_key = _without_factor(product.args[1])
        if not _fits(q, keys, v):
            continue
        mask = _sum(node, masks, sums)
        args = q, _untransposed(keys), v, mask, scale * by_query * by_key, False, None, None, torch.nan
        replace_with(node, insert(node, attention, args, node))
        count += 1
    module.graph.eliminate_dead_code()
    return count


def _normalised(weights: Any) -> Any:
    """Return the scores of weights that are their softmax over keys and nothing else's operand."""
    if not _alone(weights) or weights.target not in _SOFTMAX or not is_float32(weights):
        return None
    scores, axis = weights.args[:2]
    over_keys = axis in (-1, 3) and value(weights).ndim == 4
    return scores if over_keys and is_float32(scores) and _alone(scores) else None


def _without_masks(scores: Any) -> tuple[Any, list[Any]]:
    """Return scores and the float32 masks that were added to them: positions, then padding in MPNet."""
    if scores.target is not _ADD or argument(scores, 2, "alpha", 1) != 1:
        return scores, []
    for product, mask in (scores.args[:2], scores.args[1::-1]):
        if _alone(product) and is_float32(mask) and same_size(product, scores):
            found, masks = _without_masks(product)
            if _is_product(_without_factor(found)[0]):
                return found, [*masks, mask]
    return scores, []


def _sum(before: fx.Node, masks: list[Any], sums: dict[tuple[Any, ...], fx.Node]) -> Any:
    """Return the sum of masks, None of none; layers that add the same masks share it."""
    if len(masks) < 2:
        return masks[0] if masks else None
    key = tuple(masks)
    if key not in sums:
        total = masks[0]
        for mask in masks[1:]:
            like = value(total) + value(mask)
            total = insert(before, _ADD, (total, mask), total)
            total.meta["val"] = like
        sums[key] = total
    return sums[key]


def _without_factor(node: Any) -> tuple[Any, float]:
    """Return what a number multiplies or divides, and the factor; 1 where none does, or others read the result."""
    if _alone(node) and node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        x, number = node.args[:2]
        if isinstance(x, fx.Node) and isinstance(number, int | float) and number and is_float32(x):
            return x, float(number) if node.target in (aten.mul.Tensor, aten.mul.Scalar) else 1 / number
    return node, 1.0


def _is_product(node: Any) -> bool:
    return _alone(node) and node.target is aten.matmul.default


def _alone(node: Any) -> bool:
    """Tell whether a node computes something that one other node reads, once."""
    return isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1


def _fits(q: Any, keys: Any, v: Any) -> bool:
    """Tell whether queries, keys (width by keys) and values are float32 of as many heads."""
    if not all(is_float32(one) and value(one).ndim == 4 for one in (q, keys, v)):
        return False
    return all(same_axes(value(q).shape[:2], value(one).shape[:2]) for one in (keys, v))


def _untransposed(keys: fx.Node) -> fx.Node:
    """Return keys as (batch, heads, keys, width): the node that they were transposed from, or another view."""
    if keys.target is aten.transpose.int and {int(str(axis)) % 4 for axis in keys.args[1:3]} == {2, 3}:
        return keys.args[0]  # pyright: ignore[reportReturnType]
    order: Any = keys.args[1] if keys.target is aten.permute.default else None
    source: Any = keys.args[0] if order is not None else keys
    axes = [axis % 4 for axis in order] if order is not None else [0, 1, 2, 3]
    axes[2:] = axes[3], axes[2]
    moved = [axis for axis in range(4) if axes[axis] != axis]
    with keys.graph.inserting_after(keys):
        if len(moved) == 2:
            new = keys.graph.call_function(aten.transpose.int, (source, *moved))
        else:
            new = keys.graph.call_function(aten.permute.default, (source, axes))
    new.meta = {"val": value(keys).transpose(2, 3)}
    return new


ATTENTION_FORMULA = Rule("attention written out", rewrite)
