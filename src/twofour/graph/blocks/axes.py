"""Axes inside a block: in which order nodes have the domain's, and tensors that are joined from parts of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from twofour.graph.base import argument, aten, value

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
    inside, ndim = set(nodes), max(value(node).ndim - stacks(node) for node in nodes)
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


def parts_of(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a node joins on the last axis, one behind the other or in turns; [] of any other node."""
    given: Any = node.args[0] if node.args else None
    return [given] * repeats(node) or (list(given) if stacks(node) or _joins(node) else [])


def alternates(node: fx.Node) -> bool:
    """Whether it joins them in turns."""
    return stacks(node) or repeats(node) > 0


def stacks(node: fx.Node) -> bool:
    """Whether a node joins tensors (..., width) on a new last axis: flattened, they alternate on the last axis."""
    return node.target is aten.stack.default and value(node).ndim > 1 and _is_last(node)


def repeats(node: fx.Node) -> int:
    """How often a node puts each number of the last axis, one behind the other; 0 where it is none that does."""
    if node.target is not aten.repeat_interleave.self_int:
        return 0
    count, axis, ndim = argument(node, 1, "repeats"), argument(node, 2, "dim"), value(node).ndim
    last = isinstance(axis, int) and axis % ndim == ndim - 1
    return count if last and isinstance(count, int) else 0


def _joins(node: fx.Node) -> bool:
    return node.target is aten.cat.default and _is_last(node)


def _is_last(node: fx.Node) -> bool:
    axis, tensors, ndim = argument(node, 1, "dim", 0), node.args[0], value(node).ndim
    return isinstance(axis, int) and axis % ndim == ndim - 1 and len(tensors) > 1  # pyright: ignore


def part_of(node: fx.Node, width: Any, step: int = 1) -> tuple[fx.Node, int] | None:
    """Return what a slice of the last axis looks at and which part of that width it is, None for anything else.

    Args:
        node: Of any kind.
        width: Numbers of a part.
        step: From one number of a part to its next: 1, or how many parts alternate.
    """
    if node.target is not aten.slice.Tensor or not isinstance(width, int):
        return None
    source: Any = node.args[0]
    whole, shape = value(source).shape, value(node).shape
    axis, start, _, by = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    last = isinstance(axis, int) and axis % len(shape) == len(shape) - 1
    if not last or by != step or not isinstance(start, int | None) or not isinstance(whole[-1], int):
        return None
    begin = 0 if start is None else start % whole[-1] if start < 0 else start
    if step > 1:
        return (source, begin) if whole[-1] == step * width and begin < step else None
    fits = shape[-1] == width and whole[-1] % width == 0 and begin % width == 0
    return (source, begin // width) if fits else None
