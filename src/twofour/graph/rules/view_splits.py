"""Splitting into parts of known sizes becomes one view per part that is used, of the columns that it is made of."""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import Any

from torch import fx

from twofour.graph.base import Rule, argument, aten, calls, insert, replace_with, same_axes, value

_VIEWS = (aten.view.default, aten.reshape.default)


def rewrite(module: fx.GraphModule) -> int:
    """Replace split, chunk and unbind whose parts are taken one by one, and parts of a product's columns."""
    count = 0
    for node in calls(module.graph, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
        parts, x = value(node), node.args[0]
        dim = argument(node, 2, "dim", 0)
        sizes = [part.shape[dim] for part in parts]
        if not _taken_apart(node) or not all(isinstance(size, int) for size in sizes):
            continue
        begins = list(accumulate(sizes, initial=0))
        for user in list(node.users):
            index: Any = user.args[1]
            new = insert(user, aten.narrow.default, (x, dim, begins[index % len(parts)], sizes[index]), user)
            replace_with(user, new)
        module.graph.erase_node(node)
        count += 1
    for node in calls(module.graph, aten.unbind.int):
        taken = [(user, user.args[1] % len(value(node))) for user in node.users] if _taken_apart(node) else []
        count += _by_columns(node, argument(node, 1, "dim", 0), taken)
    for node in calls(module.graph, aten.select.int):
        count += _by_columns(node, node.args[1], [(node, node.args[2])])
    module.graph.eliminate_dead_code()
    return count


def _taken_apart(node: fx.Node) -> bool:
    return all(user.target is operator.getitem and user.op == "call_function" for user in node.users)


def _by_columns(node: fx.Node, dim: int, taken: list[tuple[fx.Node, Any]]) -> int:
    """Replace parts of an axis that splits the last one, (.., 3, heads, width) as attention has it; returns whether.

    Each is a view of the columns it is made of, as if the product had been split before its heads were: attention and
    rotations read such columns where they are.
    """
    x: Any = node.args[0]
    order = _axes(x)
    view: Any = x.args[0] if order else x
    if not taken or getattr(view, "target", None) not in _VIEWS:
        return 0
    source, whole = view.args[0], value(view)
    axis, ndim = value(source).ndim - 1, whole.ndim
    order = order or list(range(ndim))
    parts, columns = whole.shape[axis] if axis < ndim else None, value(source).shape[-1]
    numbers = all(isinstance(size, int) for size in (parts, columns, *(index for _, index in taken)))
    if order[dim % ndim] != axis or not numbers or not same_axes(whole.shape[:axis], value(source).shape[:-1]):
        return 0
    size = columns // parts
    sizes = [*view.args[1][:axis], *view.args[1][axis + 1 :]]
    left = [one - (one > axis) for one in order if one != axis]
    for part, index in taken:
        found = insert(part, aten.narrow.default, (source, -1, index % parts * size, size), source)
        found.meta["val"] = value(source).narrow(-1, index % parts * size, size)
        found = insert(part, aten.view.default, (found, sizes), part)
        found.meta["val"] = whole.select(axis, 0)
        replace_with(part, _turned(part, found, left))
    return 1


def _axes(x: Any) -> list[int]:
    """Return of a permutation which axis each of its axes was; [] of what is none."""
    target, ndim = getattr(x, "target", None), value(x).ndim
    if target is aten.permute.default:
        return [axis % ndim for axis in x.args[1]]
    if target is not aten.transpose.int:
        return []
    order = list(range(ndim))
    a, b = x.args[1:3]
    order[a], order[b] = order[b], order[a]
    return order


def _turned(part: fx.Node, found: fx.Node, order: list[int]) -> fx.Node:
    """Return a part with its axes in the order that the part has."""
    moved = [axis for axis, old in enumerate(order) if axis != old]
    if not moved:
        return found
    if len(moved) == 2:
        return insert(part, aten.transpose.int, (found, *moved), part)
    return insert(part, aten.permute.default, (found, order), part)


VIEW_SPLITS = Rule("splits into views", rewrite)
