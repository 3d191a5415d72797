"""Changes in place in an exported graph, made new tensors: torch traces the whole model a second time for that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx.node import map_arg

aten = torch.ops.aten

_NEW = {
    *(aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding, aten.linear.default),
    *(aten.batch_norm.default, aten.layer_norm.default, aten.group_norm.default, aten.max_pool2d.default),
}
"""Operators made of others whose answer is in memory of its own all the same."""

_DROPOUTS = {
    *(aten.dropout.default, aten.dropout_.default, aten.alpha_dropout.default, aten.alpha_dropout_.default),
    *(aten.feature_dropout.default, aten.feature_dropout_.default),
    *(aten.feature_alpha_dropout.default, aten.feature_alpha_dropout_.default),
}


def changes_in_place(node: fx.Node) -> bool:
    """Tell whether a node is a call of an operator that writes into what it is given."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def without_changes(graph: fx.Graph) -> bool:
    """Let operators answer with a new tensor where they write into one that nothing else has; tell whether all do.

    That is one which an operator made in memory of its own, and which no view was taken of before.
    """
    if any(map(changes_in_place, graph.nodes)):
        _without_dropout(graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if changes_in_place(node)]:
        answers = _answering(node)
        changed = node.args[0]
        if answers is None or not isinstance(changed, fx.Node) or not _is_new(changed):
            return False
        if not _alike(answers, node, changed):
            return False
        earlier = [user for user in changed.users if user is not node and places[user] < places[node]]
        if not all(map(_is_new, earlier)):
            return False
        with graph.inserting_before(node):
            new = graph.call_function(answers, node.args, node.kwargs)
        new.meta, places[new] = dict(node.meta), places[node]
        changed.replace_all_uses_with(new, lambda user, new=new, kept=(*earlier, node): user not in (new, *kept))
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return True


def _without_dropout(graph: fx.Graph) -> None:
    """Drop what answers with the very tensor it is given: torch's second trace takes that for a copy."""
    for node in [node for node in graph.nodes if node.target in _DROPOUTS]:
        x, share, training = node.args
        if isinstance(x, fx.Node) and (share == 0 or training is False):
            node.replace_all_uses_with(x)
            graph.erase_node(node)


def _answering(node: fx.Node) -> OpOverload | None:
    """Return the operator that answers with what this one writes into its first argument; None: there is none."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    space, _, name = schema.name.partition("::")
    written = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") and not name.endswith("__") else None
    found = getattr(packet, schema.overload_name or "default", None)
    if space != "aten" or found is None or written != [schema.arguments[0].name]:
        return None
    named = [one.name for one in found._schema.arguments] == [one.name for one in schema.arguments]
    return found if named and not found._schema.is_mutable else None


def _is_new(node: fx.Node) -> bool:
    """Tell whether what a node answers is one tensor in memory that nothing else lies in."""
    target = node.target
    if node.op == "output":
        return True
    if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return False
    aliases = any(one.alias_info is not None for one in (*target._schema.arguments, *target._schema.returns))
    made_of_others = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return not aliases and (not made_of_others or target in _NEW)


def _alike(answers: OpOverload, node: fx.Node, changed: fx.Node) -> bool:
    """Tell whether an operator answers with the type and shape of the tensor that is changed, as comparisons do not."""
    value = changed.meta["val"]
    if not isinstance(value, FakeTensor):
        return False
    try:
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        with value.fake_mode:
            found = answers(*args, **kwargs)
    except Exception:  # what cannot be told is left to torch
        return False
    # Free sizes are compared as they are written: to ask whether they are equal would fix them.
    return isinstance(found, Tensor) and found.dtype == value.dtype and str(found.shape) == str(value.shape)
