"""A captured graph as JSON: the calls by name, weights and layers by theirs, what it takes and holds for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from twofour.capture import KEPT, Graph
from twofour.graph.stored.check import MOST_CONSTANTS, MOST_NODES, VERSION
from twofour.graph.stored.inputs import describe_structure, describe_values, read_guards
from twofour.graph.stored.seal import sealed
from twofour.graph.stored.values import DTYPES, UnfitError, encode, target_name


def describe(
    graph: Graph, leaves: Sequence[Any], names: frozenset[str], code: str = "", said: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return a graph as it was captured, before any rule has changed it.

    Args:
        graph: From `capture`; nothing of it is kept.
        leaves: The example, of which sizes and ranges of whole numbers are kept, not the values.
        names: Parameters and buffers of the model, which the graph may read.
        code: The `fingerprint` of the model.
        said: Its `settings`.

    Raises:
        UnfitError: It calls, takes or holds something that a file has no words for.
    """
    writer = _Writer(graph, names)
    described = [writer.leaf(index, leaf) for index, leaf in enumerate(leaves)]
    nodes = [writer.call(node) for node in writer.calls]
    if len(nodes) > MOST_NODES:
        raise UnfitError("the graph is larger than what a file may hold")
    structure = graph.inputs.value([None] * len(leaves))
    (output,) = (node for node in graph.module.graph.nodes if node.op == "output")
    parts = {
        "version": VERSION,
        "inputs": describe_structure(structure),
        "leaves": described,
        "symbols": writer.symbols,
        "guards": list(read_guards(list(graph.guards), structure, [getattr(leaf, "ndim", 0) for leaf in leaves])),
        "dynamic": graph.dynamic,
        "reason": graph.reason,
        "constants": writer.constants,
        "nodes": nodes,
        "answer": encode(list(output.args[0]), writer.refer),
        "code": code,
        "settings": dict(said or {}),
    }
    return sealed(parts)


class _Writer:
    def __init__(self, graph: Graph, names: frozenset[str]) -> None:
        self.module, self.names = graph.module, names
        nodes = list(graph.module.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.calls = [node for node in nodes if node.op not in ("placeholder", "get_attr", "output")]
        self.places = {node: place for place, node in enumerate((*self.placeholders, *self.calls))}
        self.symbols: dict[str, list[int | None]] = {}
        self._known: dict[Any, str] = {}
        self.constants: list[dict[str, Any]] = []
        self._held: dict[str, int] = {}

    def leaf(self, index: int, leaf: Any) -> dict[str, Any]:
        """Return what a leaf must be."""
        held = self.placeholders[index].meta.get("val")
        if not isinstance(leaf, Tensor) or not isinstance(held, Tensor):
            return {"value": encode(leaf, self.refer)}
        if leaf.dtype not in DTYPES.values():
            raise UnfitError(f"an input is of {leaf.dtype}")
        return {
            "dtype": str(leaf.dtype).removeprefix("torch."),
            "shape": [self.size(size) for size in held.shape],
            "example": list(leaf.shape),
            "range": describe_values(leaf),
        }

    def size(self, size: Any) -> int | str:
        """Return a size of an input, or the name of its symbol."""
        if isinstance(size, int):
            return size
        expression, environment = size.node.expr, size.node.shape_env
        if expression.is_Integer:
            return int(expression)
        if not expression.is_Symbol:
            raise UnfitError(f"a size of an input is {expression}")
        if expression not in self._known:
            from torch.utils._sympy.numbers import int_oo  # slow to import; loaded by whoever made the symbol

            self._known[expression] = name = f"s{len(self._known)}"
            bounds = environment.bound_sympy(expression)
            self.symbols[name] = [int(size.node.hint), None if bounds.upper == int_oo else int(bounds.upper)]
        return self._known[expression]

    def call(self, node: fx.Node) -> list[Any]:
        """Return a node: a layer that is kept whole, or an operator with its arguments."""
        if node.op != "call_function":
            raise UnfitError(f"the graph has a node of kind {node.op}")
        if node.target is KEPT:
            return ["layer", node.args[1], encode(node.args[0], self.refer)]
        arguments = {name: encode(value, self.refer) for name, value in node.kwargs.items()}
        return [target_name(node.target), encode(list(node.args), self.refer), arguments]

    def refer(self, node: fx.Node) -> dict[str, Any]:
        """Return what stands for a node among arguments: its place, or the weight that it is."""
        if node.op != "get_attr":
            return {"node": self.places[node]}
        name = str(node.meta["weight"])
        if name in self.names:
            return {"weight": name}
        if name not in self._held:
            self._held[name] = len(self.constants)
            self.constants.append(_constant(name, getattr(self.module, str(node.target))))
        return {"constant": self._held[name]}


def _constant(name: str, value: Any) -> dict[str, Any]:
    """Return a tensor that the forward itself writes down."""
    if not isinstance(value, Tensor) or value.dtype not in DTYPES.values() or value.numel() > MOST_CONSTANTS:
        raise UnfitError(f"it holds `{name}`, which is no parameter or buffer of the model")
    if not torch.isfinite(value).all():
        raise UnfitError(f"`{name}` is not finite")
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "values": value.flatten().tolist()}
