"""Axes inside a block: in which order nodes have the domain's, and slices that are parts of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from twofour.graph.base import aten, value

SHUFFLES = (aten.permute.default, aten.transpose.int)
"""Permutations of the axes."""


class UnfitError(Exception):
    """Nodes that are no block; the text says why."""


def axis_orders(nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[int, ...]]:
    """Return of each node which of the domain's axes its own are, () where they are the same.

    The domain has the axes of the first node; those it is connected with by permutations have another order.

    Raises:
        UnfitError: A node would have two orders, or not as many axes.
    """
    if not any(node.target in SHUFFLES for node in nodes):
        return dict.fromkeys(nodes, ())
    inside, ndim = set(nodes), max(value(node).ndim for node in nodes)
    same = tuple(range(ndim))
    found: dict[fx.Node, tuple[int, ...]] = {}
    waiting = [(node, same) for node in reversed(nodes)]
    waiting.append(next(pair for pair in waiting[::-1] if value(pair[0]).ndim == ndim))
    while waiting:
        node, order = waiting.pop()
        if node in found:
            continue
        found[node] = order
        if node.target in SHUFFLES:
            moved = _permutation(node)
            if len(moved) != ndim:
                raise UnfitError("a permutation of fewer axes than the domain has")
            order = tuple(order[moved.index(axis)] for axis in range(ndim))  # of what it looks at
        waiting += [(source, order) for source in node.all_input_nodes if source in inside]
        for user in node.users:
            if user in inside:
                own = found[node]
                moved = _permutation(user) if user.target in SHUFFLES else same
                waiting.append((user, tuple(own[axis] for axis in moved)))
    for node, order in found.items():
        if node.target not in SHUFFLES and any(s in inside and found[s] != order for s in node.all_input_nodes):
            raise UnfitError("operands in different orders of the axes")
    return {node: () if order == same else order for node, order in found.items()}


def _permutation(node: fx.Node) -> tuple[int, ...]:
    ndim, (_, *args) = value(node).ndim, node.args
    if node.target is aten.permute.default:
        given: Any = args[0]
        return tuple(axis % ndim for axis in given)
    order = list(range(ndim))
    a, b = (int(axis) % ndim for axis in args)  # pyright: ignore
    order[a], order[b] = b, a
    return tuple(order)


def part_of(node: fx.Node, width: Any) -> tuple[fx.Node, int] | None:
    """Return what a slice of the last axis looks at and which part of that width it is, None for anything else."""
    if node.target is not aten.slice.Tensor or not isinstance(width, int):
        return None
    source: Any = node.args[0]
    whole, shape = value(source).shape, value(node).shape
    axis, start, _, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    last = isinstance(axis, int) and axis % len(shape) == len(shape) - 1
    if not last or step != 1 or not isinstance(start, int | None) or not isinstance(whole[-1], int):
        return None
    begin = 0 if start is None else start % whole[-1] if start < 0 else start
    fits = shape[-1] == width and whole[-1] % width == 0 and begin % width == 0
    return (source, begin // width) if fits else None
