"""Activations between the operators of a graph become bfloat16, where the operators we know compute in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from twofour.capture import changes_in_place
from twofour.graph.base import aten, constant, insert, is_float32, product_of, replace_with, value
from twofour.kernels.attention import attention, attention_of_windows
from twofour.kernels.norm import norm, norm_in_place

LOW = torch.bfloat16

VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unflatten.int,
    aten.flatten.using_ints,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.slice.Tensor,
    aten.select.int,
    aten.contiguous.default,
    aten.narrow.default,
    torch.narrow,
)
"""What only looks at its first argument, or copies it: the answer has its type."""

_POINTWISE = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.neg.default,
    aten.relu.default,
    aten.gelu.default,
    aten.silu.default,
    aten.tanh.default,
    aten.cat.default,
)
"""What torch computes in bfloat16 with one rounding per operator, as models in bfloat16 do."""


def lower_activations(module: fx.GraphModule) -> int:
    """Let products, attention, normalisations and what stands between them hand bfloat16 to each other.

    Sums stay float32 inside each operator; operators that are not known keep float32, with conversions around them, and
    so do the outputs of the graph. Wanted is a graph after `fuse`, its products not yet given kernels.

    Returns:
        How many tensors are bfloat16 now; 0 where the graph changes a tensor in place, which is left alone.
    """
    graph = module.graph
    if any(changes_in_place(node) for node in graph.nodes):
        return 0
    lowering = _Lowering(module)
    for node in list(graph.nodes):
        lowering.visit(node)
    for node in lowering.nothing:
        source: Any = node.args[0]
        replace_with(node, source)
    graph.eliminate_dead_code()
    graph.lint()
    return len(lowering.low)


class _Lowering:
    """One pass over the nodes in order; `low` holds those whose tensor has become bfloat16, `nothing` what goes."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.low: dict[fx.Node, None] = {}
        self.nothing: list[fx.Node] = []
        self.converted: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        """Lower the node, or convert what it reads back."""
        args = node.args
        sources = [source for source in node.all_input_nodes if is_float32(source) or source in self.low]
        from_low = node.target is aten.to.dtype and len(args) == 2 and (args[0] in self.low or is_low(args[0]))
        if from_low and args[1] in (torch.float32, LOW):
            self.pass_on(node)
        elif product_of(node) is not None and is_float32(node):
            self.lower(node, sources)
        elif node.target in (attention, attention_of_windows) and all(
            operand in self.low or is_low(operand) for operand in (*args[1:3], *_added(node))
        ):
            if is_float32(node):
                operands: Any = (*args[:3], *_added(node))
                self.lower(node, [operand for operand in operands if is_float32(operand)])
        elif node.target in (norm, norm_in_place):
            self.normalise(node)
        elif node.target in VIEWS and args[0] in self.low:
            self.mark(node)
        elif node.target in _POINTWISE and is_float32(node) and self.worth(node, sources):
            self.lower(node, sources)
        else:
            for source in [source for source in node.all_input_nodes if source in self.low]:
                self.convert(node, source, torch.float32)

    def pass_on(self, node: fx.Node) -> None:
        """Let a conversion between the two types be none: who wants float32 of it asks for that again."""
        self.nothing.append(node)
        if is_float32(node):
            node.args = (node.args[0], LOW)
            self.mark(node)

    def worth(self, node: fx.Node, sources: list[fx.Node]) -> bool:
        """Tell whether a pointwise node has lowered operands; a concatenation wants all: the others may be large."""
        return bool(sources) and (all if node.target is aten.cat.default else any)(s in self.low for s in sources)

    def lower(self, node: fx.Node, sources: list[fx.Node]) -> None:
        """Let the node read bfloat16 and answer in it."""
        for source in sources:
            if source not in self.low:
                self.convert(node, source, LOW)
        self.mark(node)

    def mark(self, node: fx.Node) -> None:
        """Note that the node's tensor is bfloat16."""
        node.meta["val"] = value(node).to(LOW)
        self.low[node] = None

    def normalise(self, node: fx.Node) -> None:
        """Let a normalisation read what there is and answer as its readers want; it converts on its way."""
        x: Any = node.args[0]
        wanted = torch.float32 if all(user.op == "output" for user in node.users) else LOW
        if (x in self.low) != (wanted is LOW):
            node.target = norm
            node.args = (*node.args, wanted)
        if wanted is LOW:
            self.mark(node)

    def convert(self, node: fx.Node, source: fx.Node, dtype: torch.dtype) -> None:
        """Let the node read `source` in another type: one conversion for all readers; a constant is converted now."""
        found = self.converted.get((source, dtype))
        if found is None:
            found = self.constant(source, dtype) if source.op == "get_attr" else self.inserted(source, dtype)
            self.converted[source, dtype] = found
        node.replace_input_with(source, found)

    def constant(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return a constant of the graph in another type."""
        held = getattr(self.module, str(source.target)).detach().to(dtype)
        return constant(self.module, source.next, f"_low_{source.name}", held, value(source).to(dtype))

    def inserted(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return the conversion of `source`, right behind it."""
        new = insert(behind(source), aten.to.dtype, (source, dtype), source)
        new.meta["val"] = value(source).to(dtype)
        return new


def _added(attending: fx.Node) -> list[fx.Node]:
    """Return the keys and values that stand behind the cache."""
    return [operand for operand in attending.args[6:8] if isinstance(operand, fx.Node)]


def is_low(node: Any) -> bool:
    """Tell whether the node is a bfloat16 tensor."""
    found = value(node)
    return isinstance(found, Tensor) and found.dtype is LOW


def behind(node: fx.Node) -> fx.Node:
    """Return the node before which what depends on `node` may stand: inputs come first, all of them."""
    after = node.next
    while after.op == "placeholder":
        after = after.next
    return after
