"""What depends on no input is computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from twofour.graph.base import Rule, aten, constant, escapes, value

LARGEST = 1 << 20
"""Elements a folded constant may have: a table that is larger than its sources is not worth its bytes."""

FLOATS, COPIED = 1 << 18, 4096
"""The same of real numbers: of what is computed, such as a table of relative positions; and of weights that are only
laid out otherwise, which nobody wants twice in memory."""

FOLDED = "_folded_"
"""How the name of a folded constant begins."""

_COPIES = (aten.contiguous.default, aten.clone.default, aten.to.dtype, aten._to_copy.default, aten.reshape.default)


def rewrite(module: fx.GraphModule) -> int:
    """Replace calls on constants alone, with sizes that are numbers, by their answers; weights stay as they are."""
    known: dict[fx.Node, Any] = {}
    computed: set[fx.Node] = set()
    count = 0
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            known[node] = getattr(module, str(node.target))
        elif node.op == "call_function" and _foldable(node, known, computed):
            computed |= {node} if _computes(node, computed) else set()
            arguments = map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            known[node] = node.target(*arguments[0], **arguments[1])
    for node, found in known.items():
        used_outside = any(user not in known for user in node.users)
        if node.op == "get_attr" or not used_outside:
            continue
        new = constant(module, node, FOLDED + node.name, found.clone(), node.meta.get("val"))
        node.replace_all_uses_with(new)
        count += 1
    module.graph.eliminate_dead_code()
    return count


def _computes(node: fx.Node, computed: set[fx.Node]) -> bool:
    """Tell whether a constant is more than a weight that is laid out otherwise."""
    overload: Any = node.target
    views = any(returned.alias_info for returned in overload._schema.returns)
    return not (views or overload in _COPIES) or any(source in computed for source in node.all_input_nodes)


def _foldable(node: fx.Node, known: dict[fx.Node, Any], computed: set[fx.Node]) -> bool:
    found = value(node)
    overload = node.target
    if not isinstance(found, Tensor) or not isinstance(overload, torch._ops.OpOverload) or overload._schema.is_mutable:
        return False
    if overload.namespace not in ("aten", "prims"):
        return False  # an operator of others may look at what it likes, each time
    if torch.Tag.nondeterministic_seeded in overload.tags or any(not isinstance(size, int) for size in found.shape):
        return False
    if escapes(node):
        return False  # the caller may change what it gets
    most = LARGEST if not found.is_floating_point() else FLOATS if _computes(node, computed) else COPIED
    if found.numel() > most:
        return False
    return all(source in known for source in node.all_input_nodes)


CONSTANTS = Rule("constants folded", rewrite)
