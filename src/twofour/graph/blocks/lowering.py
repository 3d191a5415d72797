"""Nodes of a graph as one expression over a domain: what stands where, which tensors are read, which are written.

The domain is the shape of the largest tensor; its last axes are the row where something is summed over them. A tensor
is in the domain as broadcasting puts it there, or, where its reduction dropped the row's axes, without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from twofour.graph.base import aten, same_axes, value
from twofour.graph.blocks.axes import (
    SHUFFLES,
    UnfitError,
    alternates,
    axis_orders,
    part_of,
    parts_of,
    stacks,
)
from twofour.graph.blocks.pointwise import lowering_of, operands
from twofour.graph.blocks.rows import REDUCTIONS, WHOLE_ROWS, axes_of, keeps_axes
from twofour.graph.operators import numel
from twofour.kernels.fused_block import Expression, Value

WRITTEN = (torch.float32, torch.bfloat16, torch.bool)
READ = (*WRITTEN, torch.uint8)

LOOKS = (
    aten.expand.default,
    aten.expand_as.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.alias.default,
    aten.detach.default,
    aten.dropout.default,
    aten.slice.Tensor,
    *SHUFFLES,
)
"""Operators that look at their input: inside a block they are nothing."""


@dataclass(frozen=True)
class Operand:
    """A tensor outside of the block, and how the domain sees it.

    Attributes:
        node: Whose it is.
        dropped: It has no axes of the row.
        order: Of each of its axes the domain's; () where they are the same.
        part: Which of the row's parts, None for all of it.
        stacked: The parts are on an axis of their own, the last.
        gathered: Of a table what chooses its rows; of that, which has no axis of the row, the table.
    """

    node: fx.Node
    dropped: bool = False
    order: tuple[int, ...] = ()
    part: int | None = None
    gathered: fx.Node | None = None
    stacked: bool = False


@dataclass
class Lowered:
    """A block as an expression.

    Attributes:
        expression: Over the domain.
        inputs: In the order of its loads.
        outputs: In the order of its stores; of a tensor in parts one for each.
        row_axes: How many of the domain's last axes are the row; 0: the last one, and nothing is summed.
        domain: Its sizes, numbers or symbols.
        parts: How many domains make the largest tensors: operands of `cat`, one behind the other on the last axis.
        alternate: The parts alternate there instead: operands of `stack`, whose last two axes a view made one.
    """

    expression: Expression
    inputs: list[Operand]
    outputs: list[Operand]
    row_axes: int
    domain: tuple[Any, ...]
    parts: int = 1
    alternate: bool = False

    @property
    def answers(self) -> list[fx.Node]:
        """Nodes whose tensors are written, each once."""
        return list(dict.fromkeys(operand.node for operand in self.outputs))


def why_alone(node: fx.Node) -> str:
    """Return why a node can be in no block, "" where it can."""
    found = value(node)
    if node.op != "call_function" or not isinstance(found, Tensor):
        return "it makes no tensor"
    if not isinstance(node.target, torch._ops.OpOverload):
        return "it has a kernel of its own"
    if node.target._schema.is_mutable:
        return "it changes its input"
    tensors = [value(source) for source in node.all_input_nodes]
    if any(not isinstance(tensor, Tensor) for tensor in tensors):
        return "it reads a size"
    if any(tensor.device.type != "cpu" for tensor in [found, *tensors]):
        return "it is not on the CPU"
    if node.target is aten.embedding.default:
        kinds = tensors[0].dtype in READ and tensors[-1].dtype is torch.int64 and len(tensors) == 2
        return "" if kinds else "a table or rows of another type"
    wrong = [str(tensor.dtype) for tensor in tensors if tensor.dtype not in READ]
    wrong += [str(found.dtype)] * (found.dtype not in WRITTEN)
    if node.target not in LOOKS and wrong:
        return f"{wrong[0].removeprefix('torch.')}: blocks compute in float32"
    if is_look(node) or _reduces(node) or parts_of(node):
        return ""
    return "" if lowering_of(node) is not None else "no lowering in graph/blocks"


def is_look(node: fx.Node) -> bool:
    """Tell whether a node is nothing inside a block."""
    return node.target in LOOKS and not (node.target is aten.dropout.default and node.args[2])


def lower(nodes: Sequence[fx.Node], read_outside: Sequence[fx.Node]) -> Lowered:
    """Return nodes as one expression.

    Args:
        nodes: In the graph's order; each of them `why_alone` lets in.
        read_outside: Those of them that others read.

    Raises:
        UnfitError: They do not fit each other.
    """
    return _Lowering(nodes).run(read_outside)


@dataclass(frozen=True)
class _Placed:
    """What a node is in the domain: one value, or one for each part; see `Operand` for the rest."""

    values: tuple[Value, ...]
    dropped: bool = False

    @property
    def of_row(self) -> bool:
        return self.values[0].of_row


class _Lowering:
    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = nodes
        self.expression = Expression()
        self.known: dict[fx.Node, _Placed] = {}
        self.loads: dict[Operand, Value] = {}
        self.row_axes, self.parts, self.alternate = 0, 1, False
        self.orders = axis_orders(nodes)
        self.domain = self._domain()

    def _domain(self) -> tuple[Any, ...]:
        reductions, joined = [node for node in self.nodes if _reduces(node)], [n for n in self.nodes if parts_of(n)]
        for node in reductions:
            axes, ndim = axes_of(node), value(node.args[0]).ndim
            if axes != tuple(range(ndim - len(axes), ndim)) or not axes or self.orders[node]:
                raise UnfitError("a reduction over other axes than the last")
            if self.row_axes not in (0, len(axes)) or ndim != value(reductions[0].args[0]).ndim:
                raise UnfitError("reductions over different axes")
            self.row_axes = len(axes)
        tensors: list[Any] = [node for node in self.nodes if not stacks(node)]
        tensors += [node.args[0] for node in reductions]
        tensors += [part for node in joined if stacks(node) for part in parts_of(node)]
        largest = max(tensors, key=lambda node: (numel(node), value(node).ndim))
        domain = self._in_domain(value(largest).shape, self.orders.get(largest, ()))
        if self.row_axes and all(map(_is_one, domain[-self.row_axes :])):
            raise UnfitError("rows of one number")
        return self._part(domain, joined, bool(reductions)) if joined else domain

    def _part(self, whole: tuple[Any, ...], joined: Sequence[fx.Node], reduces: bool) -> tuple[Any, ...]:
        """Return the domain of tensors that are joined from equal parts: one part."""
        parts = [parts_of(node) for node in joined]
        self.parts, self.alternate = len(parts[0]), alternates(joined[0])
        width = value(parts[0][0]).shape[-1]
        alike = all(same_axes([value(part).shape[-1]], [width]) for given in parts for part in given)
        alike &= all(len(given) == self.parts for given in parts) and not _is_one(width)
        alike &= all(alternates(node) == self.alternate and not self.orders[node] for node in joined)
        fits = same_axes(whole[-1:], [self.parts * width]) or (self.alternate and same_axes(whole[-1:], [width]))
        if reduces or not alike or not fits:
            raise UnfitError("tensors joined from other parts than equal ones of a row")
        return (*whole[:-1], width)

    def _in_domain(self, shape: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
        """Return a shape in the domain's order of axes, as it is where that is its own."""
        if not order:
            return tuple(shape)
        padded = [*[1] * (len(order) - len(shape)), *shape]
        return tuple(padded[order.index(axis)] for axis in range(len(order)))

    def run(self, read_outside: Sequence[fx.Node]) -> Lowered:
        for node in self.nodes:
            self.known[node] = self._look(node) if is_look(node) else self._computed(node)
        outputs = [operand for node in read_outside for operand in self._stored(node)]
        loads = list(self.loads)
        return Lowered(self.expression, loads, outputs, self.row_axes, self.domain, self.parts, self.alternate)

    def _computed(self, node: fx.Node) -> _Placed:
        if parts := parts_of(node):
            joined = tuple(self._operand(part, node, False, None) for part in parts)
            if any(value.of_row for value in joined):
                raise UnfitError("a number of each row joined with others")
            return _Placed(joined)
        if node.target is aten.embedding.default:
            return _Placed((self._gathered(node),))
        sources = [source for source in node.all_input_nodes if source in self.known]
        dropped = any(self.known[source].dropped and value(source).ndim for source in sources)
        dropped = dropped or (not sources and not _reduces(node) and self._is_dropped(node))
        parts = range(self.parts) if self._is_wide(value(node).shape) else (None,)
        found = [self._value(node, dropped, part) for part in parts]
        made = tuple(one for one in found if one is not None)
        if len(made) < len(found):
            raise UnfitError("arguments that no step has")
        return _Placed(made, not keeps_axes(node) if node.target in REDUCTIONS else dropped)

    def _gathered(self, node: fx.Node) -> Value:
        table, rows = (source for source in node.args[:2] if isinstance(source, fx.Node))
        shape, whole = value(node).shape, self.row_axes < 2 and self.parts == 1 and not self.orders[node]
        if table in self.known or rows in self.known:
            raise UnfitError("rows of a table that the block itself makes")
        if not whole or not self._aligned(shape) or not same_axes(shape[-1:], self.domain[-1:]) or len(shape) < 2:
            raise UnfitError("rows of a table that are no rows of the domain")
        found = Operand(table, gathered=rows)
        if found not in self.loads:
            self.loads[found] = self.expression.gather()
            self.loads[Operand(rows, dropped=True, gathered=table)] = self.loads[found]
        return self.loads[found]

    def _value(self, node: fx.Node, dropped: bool, part: int | None) -> Value | None:
        given = operands(node, lambda source: self._operand(source, node, dropped, part))
        reduction = REDUCTIONS.get(node.target) or WHOLE_ROWS.get(node.target)
        if reduction is not None:
            self._require_whole_row(node, dropped)
        lowering = reduction or lowering_of(node)
        return None if lowering is None else lowering(self.expression, given)

    def _require_whole_row(self, node: fx.Node, dropped: bool) -> None:
        """Refuse to reduce what is not in the domain with its whole row."""
        source: Any = node.args[0]
        shape = value(source).shape
        spread = source in self.known and self.known[source].of_row
        if dropped or spread or not same_axes(shape[-self.row_axes :], self.domain[-self.row_axes :]):
            raise UnfitError("a reduction of what is broadcast to the row")

    def _is_dropped(self, node: fx.Node) -> bool:
        """Whether a tensor of a node that reads no other of the block has no axes of the row."""
        shape = value(node).shape
        return bool(self.row_axes) and not self._aligned(shape) and same_axes(shape, self.domain[: -self.row_axes])

    def _is_wide(self, shape: Sequence[Any]) -> bool:
        """Whether a tensor has all parts of the row."""
        return self.parts > 1 and len(shape) > 0 and same_axes(shape[-1:], [self.parts * self.domain[-1]])

    def _is_stacked(self, shape: Sequence[Any]) -> bool:
        """Whether a tensor in parts has them on an axis of their own."""
        return self.alternate and same_axes(shape[-2:], (self.domain[-1], self.parts))

    def _part_of(self, node: fx.Node) -> tuple[fx.Node, int] | None:
        """Return of a slice that is a part of a row what it looks at, and which one."""
        return part_of(node, self.domain[-1], self.parts if self.alternate else 1)

    def _aligned(self, shape: Sequence[Any]) -> bool:
        """Whether broadcasting puts a shape into the domain."""
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        if len(shape) > len(self.domain):
            return False
        pairs = zip(shape, self.domain[len(self.domain) - len(shape) :], strict=True)
        return all(_is_one(mine) or statically_known_true(mine == whole) for mine, whole in pairs)

    def _operand(self, node: fx.Node, reader: fx.Node, dropped: bool, part: int | None) -> Value:
        placed = self.known.get(node)
        if placed is not None:
            if placed.dropped != dropped and value(node).ndim:
                raise UnfitError("a reduction without its axes beside what has them")
            if len(placed.values) > 1 and part is None:
                raise UnfitError("a row in parts where one is wanted whole")
            return placed.values[part or 0 if len(placed.values) > 1 else 0]
        found = self._read(node, reader, dropped, part)
        if found not in self.loads:
            self.loads[found] = self.expression.load(of_row=self._of_row(node, found))
        return self.loads[found]

    def _read(self, node: fx.Node, reader: fx.Node, dropped: bool, part: int | None) -> Operand:
        """Return how a tensor from outside is read."""
        shape, order = value(node).shape, self.orders[reader]
        if dropped and len(shape):
            if not same_axes(shape, self.domain[: -self.row_axes]):
                raise UnfitError("an operand of another shape")
            return Operand(node, dropped=True)
        if self.parts > 1 and (found := self._part_of(node)) is not None:
            node, part = found
            shape = value(node).shape
        if reader.target is aten.batch_norm.default and node is not reader.args[0]:
            axes = range(value(reader).ndim)
            channel = (0, *axes[2:], 1)  # seen as (1, ..., channels), the order puts them where they belong
            order = tuple((order or tuple(axes))[axis] for axis in channel)
        wide = self._is_wide(shape)
        seen = self._in_domain((*shape[:-1], self.domain[-1]) if wide else shape, order)
        if not self._aligned(seen) or (wide and part is None):
            raise UnfitError("an operand of another shape")
        return Operand(node, False, order if len(shape) else (), part if wide else None)

    def _of_row(self, node: fx.Node, operand: Operand) -> bool:
        """Whether an operand has one number for each row."""
        if operand.dropped:
            return True
        if not self.domain or operand.part is not None:
            return False
        shape = self._in_domain(value(node).shape, operand.order)
        inner = [_is_one(size) for size in shape[-max(1, self.row_axes) :]]
        if all(inner):
            return not _is_one(self.domain[-1]) or self.row_axes > 0
        if self.row_axes > 1:
            whole = zip(shape[-self.row_axes :], self.domain[-self.row_axes :], strict=False)
            if len(inner) < self.row_axes or not all(same_axes([a], [b]) for a, b in whole):
                raise UnfitError("an operand with a part of the row's axes")
        return False

    def _look(self, node: fx.Node) -> _Placed:
        source: Any = node.args[0]
        if source not in self.known:
            raise UnfitError("a view of an operand stays outside")
        before, shape, placed = value(source).shape, value(node).shape, self.known[source]
        if node.target in SHUFFLES:
            return placed
        if node.target is aten.slice.Tensor:
            found = self._part_of(node) if len(placed.values) > 1 else None
            if found is None:
                raise UnfitError("a view that moves values to other places")
            return _Placed((placed.values[found[1]],))
        flat = len(placed.values) > 1 and self._is_stacked(before) and self._is_wide(shape)
        if same_axes(shape, before) or (flat and same_axes(shape[:-1], before[:-2])):
            return placed
        if placed.dropped:
            if same_axes(shape, (*self.domain[: -self.row_axes], *[1] * self.row_axes)):
                return _Placed(placed.values)
            raise UnfitError("a reduction seen under another shape")
        expands = node.target in (aten.expand.default, aten.expand_as.default)
        if expands and len(placed.values) == 1 and self._aligned(self._in_domain(shape, self.orders[node])):
            return placed
        longer = len(shape) - len(before)
        if not self.orders[node] and longer >= 0 and same_axes(shape, (*[1] * longer, *before)):
            return placed
        short = [[size for size in sizes if not _is_one(size)] for sizes in (before, shape)]
        dropping = placed.of_row and self.row_axes and same_axes(shape, self.domain[: -self.row_axes])
        if dropping and len(short[0]) == len(short[1]):
            return _Placed(placed.values, dropped=True)
        raise UnfitError("a view that moves values to other places")

    def _stored(self, node: fx.Node) -> list[Operand]:
        order, placed, wanted, dropped = self.orders[node], self.known[node], self.domain, False
        shape = self._in_domain(value(node).shape, order)
        if placed.of_row:
            count = max(1, self.row_axes)
            dropped = bool(self.row_axes) and len(shape) == len(self.domain) - count
            wanted = (*self.domain[:-count], *[1] * (0 if dropped else count))
        stacked = len(placed.values) > 1 and self._is_stacked(shape)
        if len(placed.values) > 1:
            wanted = (*self.domain, self.parts) if stacked else (*self.domain[:-1], self.parts * self.domain[-1])
        if not same_axes(shape, wanted):
            raise UnfitError("others read a tensor smaller than the domain")
        for made in placed.values:
            self.expression.store(made)
        parts = range(self.parts) if len(placed.values) > 1 else (None,)
        return [Operand(node, dropped, order, part, stacked=stacked) for part in parts]


def _reduces(node: fx.Node) -> bool:
    return node.target in REDUCTIONS or node.target in WHOLE_ROWS


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
