"""Linear layers that read one input become one wider product: query, key and value read the activations once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from twofour.graph.base import Product, Rule, Source, aten, product, product_of, replace_with, same_axes, value
from twofour.kernels.attention import attention_of_windows

_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unflatten.int,
    aten.unsqueeze.default,
    attention_of_windows,
)
"""What takes a part of a wider tensor as it is."""


def rewrite(module: fx.GraphModule) -> int:
    """Join plain products of one input whose results are only looked at in another shape: the parts are no copies."""
    readers: defaultdict[Any, list[fx.Node]] = defaultdict(list)
    for node in module.graph.nodes:
        found = product_of(node)
        if found is not None and found.epilogue.plain and all(_looks(node, user) for user in node.users):
            readers[node.args[0]].append(node)
    count = 0
    for x, nodes in readers.items():
        if len(nodes) > 1 and not any(source.transposed for node in nodes for source in node.meta["product"].sources):
            _join(module.graph, x, nodes)
            count += 1
    return count


def _looks(node: fx.Node, user: fx.Node) -> bool:
    """Tell whether `user` looks at the result without a copy, also where it is a part of a wider one."""
    if user.target is not aten.view.default:
        return user.target in _VIEWS
    before, after = value(node).shape, value(user).shape
    # One that lays the last axis and another together, as torch's own attention does, needs them side by side.
    return same_axes(before[:-1], after[: len(before) - 1])


def _join(graph: fx.Graph, x: fx.Node, nodes: list[fx.Node]) -> None:
    parts_of: list[tuple[Source, ...]] = [node.meta["product"].sources for node in nodes]
    sources = tuple(source for entry in parts_of for source in entry)
    rows = [sum(source.rows for source in entry) for entry in parts_of]
    with graph.inserting_before(nodes[0]):
        joined = graph.call_function(product, (x,))
        found = value(nodes[0])
        joined.meta = {"val": found.new_empty(*found.shape[:-1], sum(rows)), "product": Product(sources)}
        begin, parts = 0, []
        for node, count in zip(nodes, rows, strict=True):
            part = graph.call_function(torch.narrow, (joined, -1, begin, count))
            part.meta = {"val": value(node)}
            parts.append(part)
            begin += count
    for node, part in zip(nodes, parts, strict=True):
        replace_with(node, part)


JOIN_QKV = Rule("products of one input joined", rewrite)
