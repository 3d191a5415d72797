"""A product and the activation of its result become one call."""

from __future__ import annotations

from torch import fx

from twofour.graph.base import Rule, argument, aten, calls, insert, is_float32, product, product_of, replace_with


def rewrite(module: fx.GraphModule) -> int:
    """Move ReLU, GELU and SiLU into the product they follow."""
    count = 0
    targets = (aten.relu.default, aten.relu_.default, aten.gelu.default, aten.silu.default, aten.silu_.default)
    for node in calls(module.graph, *targets):
        source = node.args[0]
        found = product_of(source)
        if found is None or not isinstance(source, fx.Node) or not found.epilogue.plain or len(source.users) > 1:
            continue
        if not is_float32(node):
            continue
        new = insert(node, product, source.args, node, product=found.with_epilogue(activation=_name(node)))
        replace_with(node, new)
        module.graph.erase_node(source)
        count += 1
    return count


def _name(node: fx.Node) -> str:
    if node.target is aten.gelu.default:
        return "gelu_tanh" if argument(node, 1, "approximate", "none") == "tanh" else "gelu"
    return "relu" if node.target in (aten.relu.default, aten.relu_.default) else "silu"


ACTIVATIONS = Rule("activations into products", rewrite)
