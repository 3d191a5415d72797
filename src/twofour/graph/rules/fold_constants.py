"""What depends on no input is computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from twofour.graph.base import Rule, escapes, value

LARGEST = 1 << 20
"""Elements a folded constant may have: a table that is larger than its sources is not worth its bytes."""


def rewrite(module: fx.GraphModule) -> int:
    """Replace calls on constants alone, with sizes that are numbers, by their answers; weights stay as they are."""
    known: dict[fx.Node, Any] = {}
    count = 0
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            known[node] = getattr(module, str(node.target))
        elif node.op == "call_function" and _foldable(node, known):
            arguments = map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            known[node] = node.target(*arguments[0], **arguments[1])
    for node, found in known.items():
        used_outside = any(user not in known for user in node.users)
        if node.op == "get_attr" or not used_outside:
            continue
        name = f"_folded_{node.name}"
        module.register_buffer(name, found.clone(), persistent=False)
        with module.graph.inserting_before(node):
            new = module.graph.create_node("get_attr", name)
        new.meta = {"val": node.meta.get("val"), "weight": ""}
        node.replace_all_uses_with(new)
        count += 1
    module.graph.eliminate_dead_code()
    return count


def _foldable(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    found = value(node)
    overload = node.target
    if not isinstance(found, Tensor) or not isinstance(overload, torch._ops.OpOverload) or overload._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in overload.tags or any(not isinstance(size, int) for size in found.shape):
        return False
    if escapes(node):
        return False  # the caller may change what it gets
    # A product of a weight is not a constant anyone wants twice in memory.
    if found.numel() > LARGEST or (found.is_floating_point() and found.numel() > 4096):
        return False
    return all(source in known for source in node.all_input_nodes)


CONSTANTS = Rule("constants folded", rewrite)
