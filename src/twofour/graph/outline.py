"""What a graph looks like: its calls with their mapping types, what each writes, and who reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from twofour.capture import KEPT
from twofour.graph.base import product_of
from twofour.graph.mapping import MappingType
from twofour.graph.operators import find, mapping_of, nbytes

SILENT = ("placeholder", "get_attr", "output")
"""Nodes that call nothing."""

VIEW = "view"
"""Kind of a call that moves no bytes."""


@dataclass(frozen=True)
class Call:
    """One call of a graph.

    Attributes:
        label: The operator, the layer's kernel, or what a fused block says of itself.
        mapping: Its type; None of an operator without a row, which stands alone.
        kind: "view", "operator", or "fused" of what stands for several operators.
        nbytes: Bytes of its result, 0 of a view.
        reads: Indices of the calls whose results it reads.
    """

    label: str
    mapping: MappingType | None
    kind: str
    nbytes: int
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Outline:
    """The calls of a graph in their order, sizes as they were for the example."""

    calls: tuple[Call, ...]

    @property
    def computing(self) -> int:
        """How many calls are no views."""
        return sum(call.kind != VIEW for call in self.calls)

    @property
    def nbytes(self) -> int:
        """Bytes of all results."""
        return sum(call.nbytes for call in self.calls)

    def counts(self) -> list[tuple[str, int]]:
        """Return how often each label is called, views left out, the most frequent first."""
        return Counter(call.label for call in self.calls if call.kind != VIEW).most_common()


def outline(module: fx.GraphModule) -> Outline:
    """Return what a graph calls; arithmetic on sizes is left out."""
    nodes = [node for node in module.graph.nodes if node.op not in SILENT and _makes_tensors(node)]
    places = {node: index for index, node in enumerate(nodes)}
    return Outline(
        tuple(_call(module, node, [places[n] for n in node.all_input_nodes if n in places]) for node in nodes)
    )


def _call(module: fx.GraphModule, node: fx.Node, reads: Sequence[int]) -> Call:
    row = find(node)
    view = row is not None and not row.writes
    mapping, fused = mapping_of(node), row is None
    if node.op == "call_module":
        mapping = getattr(module.get_submodule(str(node.target)), "mapping", MappingType.MANY_TO_MANY)
    elif node.target is KEPT or product_of(node) is not None:
        mapping, fused = MappingType.MANY_TO_MANY, False
    elif row is None and _ours(node):
        mapping = MappingType.MANY_TO_MANY
    written = 0 if view else nbytes(node)
    return Call(label(module, node), mapping, VIEW if view else _kind(fused), written, tuple(reads))


def _makes_tensors(node: fx.Node) -> bool:
    """Whether it is no arithmetic on sizes, nor an assertion."""
    return isinstance(node.meta.get("val"), Tensor | tuple | list)


def _kind(fused: bool) -> str:
    return "fused" if fused else "operator"


def _ours(node: fx.Node) -> bool:
    """Whether a function of this library is called: a normalisation, an attention."""
    return str(getattr(node.target, "__module__", "")).startswith("twofour.")


def label(module: fx.GraphModule, node: fx.Node) -> str:
    """Return what a report calls a node: its operator, or what its layer says of itself."""
    if "label" in node.meta:
        return str(node.meta["label"])
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return getattr(layer, "label", type(layer).__name__)
    if node.target is KEPT:
        return "conv" if node.args[3] else "linear"
    return getattr(node.target, "__name__", str(node.target)).split(".")[0]
