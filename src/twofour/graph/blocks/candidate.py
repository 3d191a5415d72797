"""A set of nodes that could be a block: whether it fits, and what it is called in the cache of measured times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from twofour.graph.base import value
from twofour.graph.blocks.axes import UnfitError
from twofour.graph.blocks.block import FusedBlock, sources_of, stored
from twofour.graph.blocks.lowering import Lowered, is_look, lower
from twofour.graph.operators import numel
from twofour.kernels.fused_block.schedule import Schedule

MOST_OPERANDS = 24
"""Operands of a block: beyond, streams of memory disturb each other."""

MOST_REGISTERS = 32
"""Registers of a block: a tile of each, 8 KiB, must stay in the second cache, and what a step touches in the first."""


@dataclass(frozen=True)
class Candidate:
    """Nodes as a block.

    Attributes:
        nodes: In the graph's order.
        lowered: What they compute.
    """

    nodes: tuple[fx.Node, ...]
    lowered: Lowered

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> Candidate:
        """Return nodes as a candidate.

        Raises:
            UnfitError: They fit no expression, or it is beyond a limit.
        """
        outside = stored(nodes)
        found = cls(tuple(nodes), lower(nodes, outside))
        if len(found.lowered.inputs) + len(outside) > MOST_OPERANDS:
            raise UnfitError(f"more than {MOST_OPERANDS} operands")
        schedule = Schedule(found.lowered.expression.stores)
        if max(len(schedule.kept), len(schedule.rows)) > MOST_REGISTERS:
            raise UnfitError(f"more than {MOST_REGISTERS} registers")
        return found

    @cached_property
    def block(self) -> FusedBlock:
        """The module."""
        return FusedBlock(self.nodes, self.lowered)

    @property
    def sources(self) -> list[fx.Node]:
        """What it reads."""
        return sources_of(self.lowered)

    @property
    def repeats(self) -> bool:
        """Whether it computes values more than once: those of a tensor that is broadcast to the domain."""
        domain = numel_of(self.lowered.domain)
        whole = [node for node in self.nodes if not is_look(node) and isinstance(value(node), Tensor)]
        rows = domain // max(1, numel_of(self.lowered.domain[-max(1, self.lowered.row_axes) :]))
        return any(numel(node) < domain and numel(node) != rows for node in whole)

    @cached_property
    def key(self) -> str:
        """Operators with their arguments, and types, sizes and strides of what they read."""
        names = {node: f"x{index}" for index, node in enumerate(self.sources)}
        lines = []
        for index, node in enumerate(self.nodes):
            names[node] = f"y{index}"
            arguments = [_text(argument, names) for argument in (*node.args, *sorted(node.kwargs.items()))]
            lines.append(f"y{index} = {node.target}({', '.join(arguments)})")
        return "\n".join([*map(described, self.sources), *lines])

    def __len__(self) -> int:
        return sum(not is_look(node) for node in self.nodes)


def numel_of(sizes: Iterable[Any]) -> int:
    """Return the product of sizes, symbols as they were for the example."""
    count = 1
    for size in sizes:
        count *= number(size)
    return count


def number(size: Any) -> int:
    """Return a size, of a symbol what it was for the example."""
    return size if isinstance(size, int) else int(size.node.hint)


def described(node: fx.Node) -> str:
    """Return a tensor's type, sizes and strides."""
    found = value(node)
    return f"{found.dtype} {[number(n) for n in found.shape]} {[number(n) for n in found.stride()]}"


def _text(argument: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(argument, fx.Node):  # what has no name is a slice of an operand
        return names.get(argument) or f"{argument.target}({', '.join(_text(one, names) for one in argument.args)})"
    if isinstance(argument, list | tuple):
        return f"[{', '.join(_text(entry, names) for entry in argument)}]"
    return repr(argument)
