"""A graph of padded batches as one of packed ones: from the first product on there are rows of real tokens alone.

Where a mask says which tokens are real and goes into attention, most operators of an encoder act on each token by
itself: products, normalisations, activations, sums. Those run on the tokens one behind the other; attention runs inside
each sequence, and needs no mask then. What else reads their answers, and the graph's outputs, see a padded batch again,
with zeros where padding stands. What stands before the first product, embeddings, stays as it was.

Whether the answers are those of the padded graph only running both tells: `compiler.ragged` does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from twofour.graph.base import argument, aten, same_axes, value
from twofour.graph.blocks.block import FusedBlock
from twofour.kernels.activation import gated_activation
from twofour.kernels.attention import attention, attention_of_columns, attention_of_sequences, attention_of_windows
from twofour.kernels.norm import norm, norm_in_place, norm_to_bytes
from twofour.kernels.ragged import Layout, pad_tokens, take_tokens
from twofour.kernels.rotation import rotation

BY_TOKEN = "by_token"
"""Attribute of modules of a graph: True where each row of the answers comes of the same row of the operands."""

_FUNCTIONS: tuple[Any, ...] = (norm, norm_in_place, norm_to_bytes, gated_activation, operator.getitem, aten.to.dtype)
"""Functions of which that holds, beside torch's element-wise operators."""

_SIZES: tuple[Any, ...] = (
    *(aten.sym_size.int, aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.new_empty.default),
    *(aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.empty_like.default),
)
"""Operators that look at their operand's sizes, not at its values."""


class NotRaggedError(Exception):
    """A graph that cannot run on packed tokens, for the reason given; "" where it has no mask of padding."""


@dataclass(frozen=True)
class Ragged:
    """A graph of packed batches.

    Attributes:
        module: The graph: inputs as before, and behind them a `Layout`'s tensors.
        mask: The input that says which tokens are real, by its index.
        batch: An input (sequences, length, ..): the mask must be of its sizes.
        by_token: For each output whether it is a padded batch, whose places of padding hold zeros.
        calls: How many calls run on packed tokens.
    """

    module: fx.GraphModule
    mask: int
    batch: int
    by_token: tuple[bool, ...]
    calls: int


def attention_masks(module: fx.GraphModule) -> fx.GraphModule:
    """Return the part of a graph that makes the masks of its attention, each once; inputs as in the whole one."""
    masks = list(dict.fromkeys(node.args[6] for node in _attending(module)))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[mask] for mask in masks if isinstance(mask, fx.Node)))
    return _without_dead_code(module, graph)


def pack(module: fx.GraphModule) -> Ragged:
    """Return a copy of a rewritten graph that computes on packed tokens; the graph stays as it is.

    Raises:
        NotRaggedError: It has no mask, or what is between its inputs and attention mixes tokens.
    """
    mask = _mask_of(module)
    attending = _attending(module)
    body = _Body(module, value(attending[0].args[0]).shape[:2])
    if apart := [node for node in attending if node not in body.nodes]:
        raise NotRaggedError(f"{_named(module, body.why(apart[0]))} is not known to act on each token by itself")
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    batches = [index for index, node in enumerate(inputs) if node is not mask and body.is_batch(node)]
    if not batches:
        raise NotRaggedError("none of its other inputs has the sizes of the batch")
    packed = _Packer(module, body, inputs[-1])
    outputs: Any = next(iter(reversed(module.graph.nodes))).args[0]
    by_token = tuple(body.is_batch(node) for node in outputs)
    return Ragged(packed.module, inputs.index(mask), batches[0], by_token, len(body.nodes))


def filled(found: Ragged, number: float) -> fx.GraphModule:
    """Return the packed graph with `number` in place of zeros at padding: an answer that changes hangs on it.

    What the mask's own values went into stays as it is: hidden values times a mask are zeros there.
    """

    def pad(x: Tensor, places: Tensor) -> Tensor:
        padding = pad_tokens(torch.ones_like(x[..., :1]), places) == 0
        return pad_tokens(x, places).masked_fill_(padding, number if x.is_floating_point() else 1)

    graph = fx.Graph()
    graph.output(graph.graph_copy(found.module.graph, {}))
    masked = {[node for node in graph.nodes if node.op == "placeholder"][found.mask]}
    for node in graph.nodes:
        if node.target not in _SIZES and not masked.isdisjoint(node.all_input_nodes):
            masked.add(node)
        elif node.target is pad_tokens:
            node.target = pad
    return fx.GraphModule(found.module, graph)


def factors_of_tokens(factor: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Return the rows of a rotation's factor that packed tokens are turned by, (1, room, width).

    Args:
        factor: As in `rotation`: a row for each position of a padded batch.
        rows: As in `Layout`.
        places: As in `Layout`, of which the size alone counts.
    """
    by_row = factor.flatten(0, -3) if factor.ndim > 2 else factor
    # A row of its own for each sequence: rows that sequences share cannot be read as those of one batch.
    return take_tokens(by_row.expand(*places.shape, factor.shape[-1]).contiguous(), rows)


def _without_dead_code(module: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Return a graph of what stands in another one's module, without what nobody reads."""
    found = fx.GraphModule(module, graph)
    found.graph.eliminate_dead_code()
    found.graph.lint()
    return found


def _attending(module: fx.GraphModule) -> list[Any]:
    """Return the calls of attention.

    Raises:
        NotRaggedError: There is none, or one that does not run by sequences.
    """
    every = [n for n in module.graph.nodes if n.target in (attention, attention_of_columns, attention_of_windows)]
    if not every:
        raise NotRaggedError("")
    if any(node.target is not attention_of_columns for node in every):
        raise NotRaggedError("its attention does not read the columns of products in place")
    if any(argument(node, 6, "mask") is None for node in every):
        hidden = [node for node in every if argument(node, 6, "mask") is not None]
        raise NotRaggedError("some of its attention has no mask" if hidden else "")
    return every


def _mask_of(module: fx.GraphModule) -> fx.Node:
    """Return the input that the masks of attention are made of.

    Raises:
        NotRaggedError: They are made of several inputs, or of something else.
    """
    found = [
        node
        for node in attention_masks(module).graph.nodes
        if node.op == "placeholder" and any(user.target not in _SIZES for user in node.users)
    ]
    named = {node.target: node for node in module.graph.nodes if node.op == "placeholder"}
    if len(found) != 1 or value(found[0]) is None or value(found[0]).ndim != 2:
        made = ", ".join(f"`{node.target}`" for node in found) or "no input"
        raise NotRaggedError(f"the mask of its attention is made of {made}, not of one (sequences, length)")
    return named[found[0].target]


class _Body:
    """The calls that act on each token by itself, from the first product on, and attention between them.

    Attributes:
        nodes: In the graph's order.
    """

    def __init__(self, module: fx.GraphModule, batch: Iterable[Any]) -> None:
        self.module, self.batch = module, tuple(batch)
        self.nodes: dict[fx.Node, None] = {}
        for node in module.graph.nodes:
            if self._belongs(node):
                self.nodes[node] = None

    def is_batch(self, node: Any) -> bool:
        """Tell whether a node is a tensor (sequences, length, ..), or several of them."""
        found = value(node)
        tensors = found if isinstance(found, tuple | list) else (found,)
        return bool(tensors) and all(
            isinstance(one, Tensor) and one.ndim > 1 and same_axes(one.shape[:2], self.batch) for one in tensors
        )

    def why(self, node: fx.Node) -> fx.Node:
        """Return what keeps a node out: the first of what it reads, and of what those read, behind the body's calls."""
        inside = [source for source in node.all_input_nodes if source in self.nodes]
        if inside or node.target is not attention_of_columns:
            return node
        source = node.args[0]
        return self.why(source) if isinstance(source, fx.Node) and source.op == "call_function" else node

    def _belongs(self, node: fx.Node) -> bool:
        if node.op not in ("call_function", "call_module") or not self.is_batch(node):
            return False
        if node.target is attention_of_columns:
            return all(self._is_token(operand) for operand in node.args[:3])
        if node.target is rotation:
            return node.args[0] in self.nodes and self.nodes.keys().isdisjoint(node.args[1:3])  # factors: by position
        module = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        acts = getattr(module, BY_TOKEN, False) or isinstance(module, FusedBlock) or _by_token(node)
        begins = bool(getattr(module, BY_TOKEN, False)) or any(one in self.nodes for one in node.all_input_nodes)
        return acts and begins and all(map(self._fits, node.all_input_nodes))

    def _is_token(self, node: Any) -> bool:
        found = value(node)
        return node in self.nodes or (self.is_batch(node) and isinstance(found, Tensor) and found.ndim > 2)

    def _fits(self, node: fx.Node) -> bool:
        """Tell whether an operand has a row for each token, or is the same for all."""
        found = value(node)
        if self._is_token(node) or not isinstance(found, Tensor):
            return True
        return found.ndim < 2 or (found.ndim > 2 and same_axes(found.shape[:2], (1, 1)))


def _by_token(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function":
        return False
    if target in _FUNCTIONS:
        return True
    known = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
    return known and torch.Tag.pointwise in target.tags


def _named(module: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_module":
        return f"`{getattr(module.get_submodule(str(node.target)), 'label', node.target)}`"
    return f"`{getattr(node.target, '__name__', node.target)}`"


class _Packer:
    """Writes the packed graph: one pass over the nodes in order."""

    def __init__(self, module: fx.GraphModule, body: _Body, last: fx.Node) -> None:
        self.body, self.graph = body, fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.across: dict[tuple[fx.Node, Callable[..., Tensor]], fx.Node] = {}
        self.layout: dict[str, fx.Node] = {}
        for node in module.graph.nodes:
            self.copies[node] = self._copy(node)
            if node is last:  # of the inputs
                self.layout = {name: self.graph.placeholder(f"packed_{name}") for name in Layout._fields}
        self.module = _without_dead_code(module, self.graph)

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self.body.nodes:
            return self.graph.node_copy(node, self._padded)
        if node.target is rotation:
            x, cos, sin, *rest = node.args
            factors = (self._of_tokens(factor) for factor in (cos, sin))  # pyright: ignore
            new = self.graph.call_function(rotation, (self.copies[x], *factors, *rest))  # pyright: ignore
            new.meta = dict(node.meta)
            return new
        if node.target is not attention_of_columns:
            return self.graph.node_copy(node, self._packed)
        q, k, v, begins, sizes, width, _, *rest = node.args
        scale, causal, _, *whole = (*rest, *(None, False, 0.0)[len(rest) :])
        whole = [self.copies[one] if isinstance(one, fx.Node) else one for one in whole]
        operands = [self._packed(operand) for operand in (q, k, v)]  # pyright: ignore
        args = *operands, begins, sizes, width, self.layout["offsets"], scale, causal, *whole
        new = self.graph.call_function(attention_of_sequences, args, {"places": self.layout["places"]})
        new.meta = dict(node.meta)
        return new

    def _packed(self, node: fx.Node) -> fx.Node:
        """Return what a call of the body reads: packed rows of what has a row for each token."""
        taken = node not in self.body.nodes and self.body._is_token(node)
        return self._moved(node, take_tokens, self.layout["rows"]) if taken else self.copies[node]

    def _of_tokens(self, factor: fx.Node) -> fx.Node:
        """Return the factors of positions for each packed row."""
        key = factor, factors_of_tokens
        if key not in self.across:
            given = self.copies[factor], self.layout["rows"], self.layout["places"]
            self.across[key] = self.graph.call_function(factors_of_tokens, given)
        return self.across[key]

    def _padded(self, node: fx.Node) -> fx.Node:
        """Return what any other call reads."""
        if node not in self.body.nodes or isinstance(value(node), tuple | list):
            return self.copies[node]
        return self._moved(node, pad_tokens, self.layout["places"])

    def _moved(self, node: fx.Node, move: Callable[..., Tensor], order: fx.Node) -> fx.Node:
        key = node, move
        if key not in self.across:
            new = self.graph.call_function(move, (self.copies[node], order))
            new.meta = {"val": value(node)}
            self.across[key] = new
        return self.across[key]
