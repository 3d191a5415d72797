"""Algebra on the graph of a compiled model: its layers are opened for the rules, and closed again where none took them.

A sparse weight is never merged with another one: the sum, the product and the scaled sum of 2:4 weights are dense. Only
numbers along one axis, such as a layer scale, are multiplied into it: its zeros stay.
Merging belongs before pruning (`twofour.simplify`), and the plan says where it was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour import masks
from twofour.capture import KEPT
from twofour.compiler.layer import CompiledLinear
from twofour.graph import ALL_RULES, Outcome, rewrite
from twofour.graph.base import aten, calls, constant, insert, replace_with, value

BEFORE = "merged with others it would be dense; twofour.simplify(model, example) merges before pruning"
"""What to do about a sparse weight."""


def rewrite_algebra(
    module: fx.GraphModule,
    fast: nn.Module,
    layers: Mapping[str, CompiledLinear],
    kind: str,
    *,
    merge: bool,
    without: Collection[str] = (),
) -> Outcome:
    """Rewrite the graph of a compiled model by the rules of algebra.

    Args:
        module: The captured graph, simplified; it is changed.
        fast: The model with compiled layers, for the masks of those that stayed torch's own.
        layers: The compiled layers by name.
        kind: "exact" or "close".
        merge: Whether weights may be computed from others, which are kept beside them.
        without: Names of rules to leave out.

    Raises:
        FailedRuleError: A rule raised.
    """
    masked = masks.of(fast)
    for node in module.graph.nodes:
        if node.op == "get_attr" and (found := masked.get(node.meta.get("weight", ""))) is not None:
            node.meta |= {"sealed": f"`{node.meta['weight']}` is {found.pattern.name}: {BEFORE}", "scalable": True}
    opened: dict[str, tuple[fx.Node, fx.Node | None]] = {}
    for node in calls(module.graph, KEPT):
        if not node.args[3] and node.args[1] in layers:
            _open(module, node, layers[node.args[1]], opened)
    outcome = rewrite(module, [rule for rule in ALL_RULES if rule.name not in without], kind=kind, merge=merge)
    for name, (weight, bias) in opened.items():
        _close(module, name, layers[name], weight, bias)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    return outcome


def _open(
    module: fx.GraphModule, node: Any, layer: CompiledLinear, opened: dict[str, tuple[fx.Node, fx.Node | None]]
) -> None:
    """Replace a layer by a product with attributes that stand for its weight and bias."""
    x, name = node.args[:2]
    if value(x).dtype != torch.float32:
        return
    if name not in opened:
        like = partial(value(x).new_empty, dtype=torch.float32)
        size = (layer.out_features, value(x).shape[-1])  # the graph may have a symbol there, and is then free of guards
        weight = _standing(module, f"{name}.weight", like(size), lambda: _dense(layer))
        rounded = any(prepared.kernel.dtype != "float32" for prepared in layer.prepared.weights)
        weight.meta |= {"sealed": _why_sealed(name, layer), "scalable": not rounded}
        bias = layer.bias
        held = None if bias is None else _standing(module, f"{name}.bias", like(size[:1]), lambda: bias)
        weight.meta["bias"] = held
        opened[name] = weight, held
    replace_with(node, insert(node, aten.linear.default, (x, *filter(None, opened[name])), node))


def _standing(module: fx.GraphModule, name: str, like: Tensor, held: Callable[[], Tensor]) -> fx.Node:
    """Add an attribute without values: they are asked for when a rule merges them."""
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    first = next(iter(module.graph.nodes))
    return constant(module, first, f"_opened.{name}", nothing, like, {"weight": name, "held": held})


def _dense(layer: CompiledLinear) -> Tensor:
    found = layer.prepared.source()
    return found if isinstance(found, Tensor) else found.unpack()


def _why_sealed(name: str, layer: CompiledLinear) -> str:
    if layer.pattern is not None:
        return f"`{name}` is {layer.pattern.name}: {BEFORE}"
    if any(prepared.kernel.dtype != "float32" or prepared.kernel.sparse for prepared in layer.prepared.weights):
        return f"`{name}` is held in {layer.prepared.weights[0].kernel.dtype}: merging would round it twice"
    return ""


def _close(module: fx.GraphModule, name: str, layer: CompiledLinear, weight: fx.Node, bias: fx.Node | None) -> None:
    """Let the layer compute again where its weight is read as it was; elsewhere hold the weight as a plain one."""
    users: list[Any] = list(weight.users)  # fx types arguments too widely
    for user in users:
        added = user.args[2] if len(user.args) > 2 else None
        if user.target is aten.linear.default and user.args[1] is weight and added is bias:
            replace_with(user, insert(user, KEPT, (user.args[0], name, layer.out_features, []), user))
    for node in (weight, bias):
        if node is not None and node.users:
            held, stored = node.meta["held"](), node.meta["weight"]
            node.replace_all_uses_with(constant(module, node, stored, held, value(node), {"weight": stored}))
