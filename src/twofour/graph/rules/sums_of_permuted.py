"""A sum with a permuted product becomes the permuted sum: the product adds what is only looked at in its order.

ConvNeXt's blocks end so: a linear layer over channels, put back in the order of images, and the residual sum.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from twofour.graph.algebra.rules.layout import permutation
from twofour.graph.base import Rule, aten, calls, is_float32, product_of, replace_with, same_size, value


def rewrite(module: fx.GraphModule) -> int:
    """Replace add(permute(product), x) by permute(add(product, x in the product's order))."""
    order = {node: index for index, node in enumerate(module.graph.nodes)}
    count = 0
    for node in calls(module.graph, aten.add.Tensor):
        if len(node.args) != 2 or node.kwargs or not is_float32(node):
            continue
        fitting = [(order.get(a, 0), a, b) for a, b in (node.args, node.args[::-1]) if _fits(node, a, b)]
        if fitting:
            _, moved, other = max(fitting, key=lambda entry: entry[0])  # the later of two: the other is there by then
            _replace(node, moved, other)
            count += 1
    module.graph.eliminate_dead_code()
    return count


def _fits(node: fx.Node, moved: Any, other: Any) -> bool:
    source: Any = moved.args[0] if permutation(moved) is not None and len(moved.users) == 1 else None
    found = product_of(source)
    if found is None or found.epilogue.combine != "none" or len(source.users) > 1 or moved is other:
        return False
    return is_float32(other) and same_size(moved, other) and same_size(moved, node)


def _replace(node: fx.Node, moved: Any, other: fx.Node) -> None:
    axes: Any = permutation(moved)
    back = [axes.index(axis) for axis in range(len(axes))]
    added = permuted(node, other, back)
    with node.graph.inserting_before(node):
        total = node.graph.call_function(aten.add.Tensor, (moved.args[0], added))
    total.meta = {"val": value(moved.args[0])}
    new = permuted(node, total, list(axes))
    replace_with(node, new)
    for user in [user for user in new.users if permutation(user) == tuple(back)]:
        replace_with(user, total)


def permuted(before: fx.Node, x: fx.Node, axes: list[int]) -> fx.Node:
    """Return x in another order of axes, as it is where a permutation is undone."""
    inner: Any = permutation(x)
    if inner is not None and [inner[axis] for axis in axes] == list(range(len(axes))):
        return x.args[0]  # pyright: ignore[reportReturnType]
    with before.graph.inserting_before(before):
        new = before.graph.call_function(aten.permute.default, (x, axes))
    new.meta = {"val": value(x).permute(axes)}
    return new


SUMS_OF_PERMUTED = Rule("sums in a product's order", rewrite)
