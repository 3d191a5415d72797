"""Every product by a weight becomes one kind of node: layers kept whole, linear, and addmm as GPT-2 writes it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from twofour.capture import KEPT
from twofour.graph.base import (
    Product,
    Rule,
    Source,
    aten,
    calls,
    insert,
    is_float32,
    product,
    replace_with,
    same_axes,
    value,
)


def rewrite(module: fx.GraphModule) -> int:
    """Replace them by `product` nodes."""
    count = 0
    for node in calls(module.graph, KEPT, aten.linear.default, aten.addmm.default):
        found = _read(node)
        if found is not None:
            x, source = found
            x, node = _unflattened(x, node)
            replace_with(node, insert(node, product, (x,), node, product=Product((source,))))
            count += 1
    module.graph.eliminate_dead_code()
    return count


def _unflattened(x: Any, node: fx.Node) -> tuple[Any, fx.Node]:
    """Return input and last node without the views around a product that flatten (batch, length) and undo it."""
    users = list(node.users)
    views = (aten.view.default, aten.reshape.default)
    if len(users) != 1 or users[0].target not in views or not isinstance(x, fx.Node) or x.target not in views:
        return x, node
    source, last = x.args[0], users[0]
    before, after, flat = value(source), value(last), value(x)
    if flat.ndim != 2 or before.ndim != after.ndim or not same_axes(before.shape[:-1], after.shape[:-1]):
        return x, node
    kept = before.shape[-1] == flat.shape[-1] and after.shape[-1] == value(node).shape[-1]
    return (source, last) if kept else (x, node)


def _read(node: Any) -> tuple[Any, Source] | None:
    if node.target is KEPT:
        x, name, width, axes = node.args
        assert isinstance(name, str) and isinstance(width, int), node.args
        return None if axes else (x, Source(name, "", "", width))  # of a convolution there are axes
    if node.target is aten.linear.default:
        x, weight = node.args[:2]
        bias, transposed = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias"), False
    else:
        bias, x, weight = node.args[:3]
        transposed = True
        if node.kwargs:  # alpha, beta
            return None
    matrix = value(weight)
    if not _stored(weight) or not isinstance(matrix, Tensor) or matrix.ndim != 2 or not is_float32(weight):
        return None
    rows = matrix.shape[1 if transposed else 0]
    if bias is not None and (not _stored(bias) or tuple(value(bias).shape) != (rows,)):
        return None
    return x, Source("", weight.meta["weight"], "" if bias is None else bias.meta["weight"], int(rows), transposed)


def _stored(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr" and bool(node.meta.get("weight"))


MARK_PRODUCTS = Rule("products by a weight", rewrite)
