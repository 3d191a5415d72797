"""Every product by a weight becomes one kind of node: layers kept whole, linear, and addmm as GPT-2 writes it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from twofour.capture import KEPT
from twofour.graph.base import Product, Rule, Source, aten, calls, insert, is_float32, product, replace_with, value


def rewrite(module: fx.GraphModule) -> int:
    """Replace them by `product` nodes."""
    count = 0
    for node in calls(module.graph, KEPT, aten.linear.default, aten.addmm.default):
        found = _read(node)
        if found is not None:
            x, source = found
            replace_with(node, insert(node, product, (x,), node, product=Product((source,))))
            count += 1
    return count


def _read(node: Any) -> tuple[Any, Source] | None:
    if node.target is KEPT:
        x, name, width = node.args
        assert isinstance(name, str) and isinstance(width, int), node.args
        return x, Source(name, "", "", width)
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


PRODUCTS = Rule("products by a weight", rewrite)
