"""What a graph costs: FLOPs, the memory traffic that fusing leaves, and a little for each call.

A chain of element-wise operators is one pass over memory: what only the next of them, or a reduction, reads is never
written. So a rule pays by what remains after fusing, and one that only shortens such a chain gains its FLOPs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from twofour.graph import operators
from twofour.graph.mapping import MappingType

FLOPS = 5e10
"""FLOPs a second of one core: products reach it, and what is weighed against bytes need not be exact."""

BYTES = 1e10
"""Bytes a second of one core."""

CALL = 5e-7
"""Seconds of a call whatever it computes, so that of two graphs with the same arithmetic the shorter one is taken."""


TRANSCENDENTAL = 10
"""Multiplications and additions that an exponential, a logarithm or a division takes, which the table counts as one."""

_SLOW = (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "div",
    "pow",
    "tanh",
    "erf",
    "sin",
    "cos",
)


@dataclass(frozen=True)
class Cost:
    """Of some nodes of a graph.

    Attributes:
        flops: Arithmetic operations.
        traffic: Bytes read and written.
        calls: Operators.
    """

    flops: int = 0
    traffic: int = 0
    calls: int = 0

    @property
    def seconds(self) -> float:
        """Return the three as one number."""
        return self.flops / FLOPS + self.traffic / BYTES + self.calls * CALL

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.traffic + other.traffic, self.calls + other.calls)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.flops - other.flops, self.traffic - other.traffic, self.calls - other.calls)


@dataclass(frozen=True)
class Graph:
    """A graph as costs are asked for: without some nodes, and with one node read by another's users.

    Attributes:
        without: Nodes that count as not there.
        instead: Node -> node whose users it has.
        constant: Nodes that are computed before anything runs.
    """

    without: Collection[fx.Node] = ()
    instead: Mapping[fx.Node, fx.Node] | None = None
    constant: Collection[fx.Node] = ()

    def cost(self, nodes: Collection[fx.Node]) -> Cost:
        """Return what the nodes cost together."""
        return sum((self._one(node) for node in nodes if node not in self.constant), Cost())

    def _one(self, node: fx.Node) -> Cost:
        if node.op != "call_function":
            return Cost()
        row = operators.find(node)
        if row is not None and not row.writes:
            return Cost(calls=1)
        read = sum(operators.nbytes(source) for source in node.all_input_nodes if self._in_memory(source))
        written = operators.nbytes(node) if self._in_memory(node) else 0
        slow = TRANSCENDENTAL if _name(node) in _SLOW else 1
        return Cost(slow * operators.flops(node), read + written, 1)

    def users(self, node: fx.Node) -> list[fx.Node]:
        """Return who reads a node."""
        readers = [*node.users, *((self.instead or {}).get(node, node).users if self.instead else ())]
        return [user for user in dict.fromkeys(readers) if user not in self.without]

    def _in_memory(self, node: Any) -> bool:
        """Tell whether a value is written: not inside a chain of element-wise operators, nor one that a sum reads."""
        if node.op != "call_function":
            return True
        row = operators.find(node)
        if row is not None and not row.writes and node.all_input_nodes:
            return self._in_memory(node.all_input_nodes[0])
        readers = self.users(node)
        return not (_element_wise(node) and readers and all(_absorbs(user) for user in readers))


def _element_wise(node: fx.Node) -> bool:
    row = operators.find(node)
    return row is not None and row.writes and row.mapping is MappingType.ONE_TO_ONE


_READERS = ("sum", "mean", "prod", "amax", "amin", "softmax", "log_softmax", "layer_norm", "var", "logsumexp")


def _absorbs(node: fx.Node) -> bool:
    """Tell whether an operator computes its element-wise inputs as it reads them."""
    return node.op == "call_function" and (_element_wise(node) or _name(node) in _READERS)


def _name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "_schema", None), "name", "")).partition("::")[2]
