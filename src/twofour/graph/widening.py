"""Activations between the operators of a model in bfloat16 become float32, where the operators we know compute in it.

Such a model rounds after every operator. A fused call rounds where it stores, so its rules are those of float32; what
the model keeps or answers, a cache and logits, has its own type still. `precision` then hands bfloat16 between the
fused calls again: the answer has fewer roundings than the model's own.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import Tensor, fx

from twofour.capture import KEPT, changes_in_place
from twofour.graph.base import aten, constant, insert, value
from twofour.graph.precision import LOW, VIEWS, behind, is_low

LARGEST = 1 << 20
"""Numbers of a constant that is kept in float32 too; a larger one, a table of words, is converted where it is read."""

_VIEWS = (
    *VIEWS,
    aten.expand.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.dropout.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.repeat_interleave.self_int,
    operator.getitem,
)
"""What only looks at its first argument, or copies it, and what models have of it before `fuse`: wide where that is."""

_CASTS = (aten.to.dtype, aten._to_copy.default)

_JOINED = (aten.cat.default, aten.scaled_dot_product_attention.default, aten.matmul.default)
"""What is computed in float32 only where all that it reads is: else a cache would be converted in each call."""

_COMPUTED = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.rsqrt.default,
    aten.mean.dim,
    aten.relu.default,
    aten.gelu.default,
    aten.silu.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.softmax.int,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten.batch_norm.default,
    aten.hardtanh.default,
    aten.relu6.default,
    aten.clamp.default,
    aten.hardswish.default,
    aten.hardsigmoid.default,
    aten.pad.default,
    aten.max_pool2d.default,
    aten.avg_pool2d.default,
    aten.adaptive_avg_pool2d.default,
)
"""What is computed in float32, whatever it reads."""


def widen_activations(module: fx.GraphModule, layers: Collection[str]) -> int:
    """Let what a bfloat16 model's operators hand to each other be float32; its outputs stay bfloat16.

    Wanted is a graph as captured.

    Args:
        module: The graph; it is changed.
        layers: Names of kept layers that answer in the dtype they read.

    Returns:
        How many tensors are float32 now; 0 where no such layer answers in bfloat16, or the graph changes a tensor in
        place: it is left alone then.
    """
    graph = module.graph
    kept = [node for node in graph.nodes if node.target is KEPT and node.args[1] in layers and is_low(node)]
    if not kept or any(changes_in_place(node) for node in graph.nodes):
        return 0
    widening = _Widening(module, layers)
    for node in list(graph.nodes):
        widening.visit(node)
    graph.eliminate_dead_code()
    graph.lint()
    return len(widening.wide)


class _Widening:
    """One pass over the nodes in order; `wide` holds those whose tensor was bfloat16 and is float32 now."""

    def __init__(self, module: fx.GraphModule, layers: Collection[str]) -> None:
        self.module, self.layers = module, layers
        self.wide: dict[fx.Node, None] = {}
        self.converted: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        """Widen the node, or convert what it reads back."""
        if node.target in _CASTS and is_low(node):
            self.uncast(node)
            return
        sources = [source for source in node.all_input_nodes if source in self.wide or is_low(source)]
        if not sources or node.target in (*_CASTS, aten.sym_size.int):
            return
        if node.target in _VIEWS and node.args[0] in self.wide:
            self.mark(node)
        elif self.computes(node, sources):
            for source in sources:
                if source not in self.wide:
                    self.convert(node, source, torch.float32)
            self.mark(node)
        else:
            for source in sources:
                if source in self.wide:
                    self.convert(node, source, LOW)

    def computes(self, node: fx.Node, sources: list[fx.Node]) -> bool:
        """Tell whether a node is computed in float32."""
        if node.target is KEPT:
            return node.args[1] in self.layers
        return node.target in _COMPUTED or (node.target in _JOINED and all(one in self.wide for one in sources))

    def uncast(self, node: fx.Node) -> None:
        """Let a conversion to bfloat16 answer float32: of what is float32 it is nothing then, and is removed later."""
        source = node.args[0]
        if not isinstance(source, fx.Node) or not isinstance(value(source), Tensor):
            return
        if not (source in self.wide or value(source).dtype is torch.float32):
            return
        if "dtype" in node.kwargs:
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
        else:
            node.args = (source, torch.float32, *node.args[2:])
        self.mark(node)

    def mark(self, node: fx.Node) -> None:
        """Note that the node's tensor, if it was bfloat16, is float32."""
        found = value(node)
        if isinstance(found, Tensor) and found.dtype is LOW:
            node.meta["val"] = found.to(torch.float32)
            self.wide[node] = None
        elif isinstance(found, list | tuple) and all(isinstance(one, Tensor) and one.dtype is LOW for one in found):
            node.meta["val"] = type(found)(one.to(torch.float32) for one in found)
            self.wide[node] = None

    def convert(self, node: fx.Node, source: fx.Node, dtype: torch.dtype) -> None:
        """Let the node read `source` in another type: one conversion for all readers; a constant is converted now."""
        found = self.converted.get((source, dtype))
        if found is None:
            found = self.constant(source) if self.is_small_constant(source) else self.inserted(source, dtype)
            self.converted[source, dtype] = found
        node.replace_input_with(source, found)

    def is_small_constant(self, source: fx.Node) -> bool:
        return source.op == "get_attr" and value(source).numel() <= LARGEST

    def constant(self, source: fx.Node) -> fx.Node:
        """Return a constant of the model in float32."""
        held = getattr(self.module, str(source.target)).detach().float()
        return constant(self.module, source.next, f"_wide_{source.name}", held, value(source).float())

    def inserted(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return the conversion of `source`, right behind it."""
        new = insert(behind(source), aten.to.dtype, (source, dtype), source)
        new.meta["val"] = value(source).to(dtype)
        return new
