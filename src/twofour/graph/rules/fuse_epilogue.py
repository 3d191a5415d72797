"""A product, the activation of its result and a sum or product with another tensor become one call."""

from __future__ import annotations

from typing import Any

from torch import fx

from twofour.graph.base import (
    ACTIVATION_CALLS,
    Rule,
    activation_name,
    aten,
    calls,
    insert,
    is_float32,
    product,
    product_of,
    replace_with,
    same_size,
)

_OPERATIONS = {
    aten.add.Tensor: "add",
    aten.add_.Tensor: "add",
    aten.mul.Tensor: "multiply",
    aten.mul_.Tensor: "multiply",
}


def _activations(module: fx.GraphModule) -> int:
    """Move ReLU, GELU and SiLU into the product they follow."""
    count = 0
    for node in calls(module.graph, *ACTIVATION_CALLS):
        source = node.args[0]
        found = product_of(source)
        if found is None or not isinstance(source, fx.Node) or not found.epilogue.plain or len(source.users) > 1:
            continue
        if not is_float32(node):
            continue
        new = insert(node, product, source.args, node, product=found.with_epilogue(activation=activation_name(node)))
        replace_with(node, new)
        module.graph.erase_node(source)
        count += 1
    return count


def _combinations(module: fx.GraphModule) -> int:
    """Move residual sums and gates into the product whose result they take."""
    order = {node: index for index, node in enumerate(module.graph.nodes)}
    count = 0
    for node in calls(module.graph, *_OPERATIONS):
        if len(node.args) != 2 or node.kwargs or not is_float32(node):
            continue
        fitting = [
            (order.get(a, 0), a, b) for a, b in (node.args, node.args[::-1]) if _fits(node, a, b)
        ]  # the later of two: the other is there when it runs
        if not fitting:
            continue
        _, source, other = max(fitting, key=lambda entry: (_activated(entry[1]), entry[0]))
        found = product_of(source)
        assert found is not None
        fused = found.with_epilogue(combine=_OPERATIONS[node.target])
        new = insert(node, product, (source.args[0], other), node, product=fused)
        order[new] = order[node]
        replace_with(node, new)
        module.graph.erase_node(source)
        count += 1
    return count


def _fits(node: fx.Node, source: Any, other: Any) -> bool:
    found = product_of(source)
    if found is None or found.epilogue.combine != "none" or source is other or len(source.users) > 1:
        return False
    return is_float32(other) and same_size(source, other) and same_size(source, node)


def _activated(node: fx.Node) -> bool:
    found = product_of(node)
    return found is not None and found.epilogue.activation != "none"


ACTIVATIONS = Rule("activations into products", _activations)
COMBINATIONS = Rule("sums and gates into products", _combinations)
