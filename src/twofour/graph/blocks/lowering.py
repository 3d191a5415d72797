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
    aten.alias.default,
    aten.detach.default,
    aten.dropout.default,
)
"""Operators that look at their input: inside a block they are nothing."""


class UnfitError(Exception):
    """Nodes that are no block; the text says why."""


@dataclass(frozen=True)
class Operand:
    """A tensor outside of the block.

    Attributes:
        node: Whose it is.
        dropped: It has no axes of the row.
    """

    node: fx.Node
    dropped: bool = False


@dataclass
class Lowered:
    """A block as an expression.

    Attributes:
        expression: Over the domain.
        inputs: In the order of its loads.
        outputs: In the order of its stores.
        row_axes: How many of the domain's last axes are the row; 0: the last one, and nothing is summed.
        domain: Its sizes, numbers or symbols.
    """

    expression: Expression
    inputs: list[Operand]
    outputs: list[Operand]
    row_axes: int
    domain: tuple[Any, ...]


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
    wrong = [str(tensor.dtype) for tensor in tensors if tensor.dtype not in READ]
    wrong += [str(found.dtype)] * (found.dtype not in WRITTEN)
    if node.target not in LOOKS and wrong:
        return f"{wrong[0].removeprefix('torch.')}: blocks compute in float32"
    if is_look(node) or node.target in REDUCTIONS or node.target in WHOLE_ROWS:
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
    value: Value
    dropped: bool = False


class _Lowering:
    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = nodes
        self.expression = Expression()
        self.known: dict[fx.Node, _Placed] = {}
        self.loads: dict[Operand, Value] = {}
        self.row_axes = 0
        self.domain = self._domain()

    def _domain(self) -> tuple[Any, ...]:
        reductions = [node for node in self.nodes if _reduces(node)]
        if reductions:
            first: Any = reductions[0].args[0]
            ndim = value(first).ndim
            for node in reductions:
                axes, own = axes_of(node), value(node.args[0]).ndim
                if axes != tuple(range(own - len(axes), own)) or not axes:
                    raise UnfitError("a reduction over other axes than the last")
                if len(axes) != len(axes_of(reductions[0])) or own != ndim:
                    raise UnfitError("reductions over different axes")
            self.row_axes = len(axes_of(reductions[0]))
        tensors = [*self.nodes, *(node.args[0] for node in reductions)]
        largest: Any = max(tensors, key=lambda node: (numel(node), value(node).ndim))
        domain = tuple(value(largest).shape)
        if all(map(_is_one, domain[-max(1, self.row_axes) :])) and self.row_axes:
            raise UnfitError("rows of one number")
        return domain

    def run(self, read_outside: Sequence[fx.Node]) -> Lowered:
        for node in self.nodes:
            self.known[node] = self._look(node) if is_look(node) else self._computed(node)
        outputs = [self._stored(node) for node in read_outside]
        return Lowered(self.expression, list(self.loads), outputs, self.row_axes, self.domain)

    def _computed(self, node: fx.Node) -> _Placed:
        sources = [source for source in node.all_input_nodes if source in self.known]
        dropped = any(self.known[source].dropped and value(source).ndim for source in sources)
        dropped = dropped or (not sources and not _reduces(node) and self._is_dropped(node))
        given = operands(node, lambda source: self._operand(source, dropped))
        reduction = REDUCTIONS.get(node.target) or WHOLE_ROWS.get(node.target)
        if reduction is not None:
            self._whole_row(node, dropped)
            made = reduction(self.expression, given)
            dropped = node.target in REDUCTIONS and not keeps_axes(node)
        else:
            lowering = lowering_of(node)
            made = None if lowering is None else lowering(self.expression, given)
        if made is None:
            raise UnfitError("arguments that no step has")
        return _Placed(made, dropped)

    def _whole_row(self, node: fx.Node, dropped: bool) -> None:
        """Refuse to reduce what is not in the domain with its whole row."""
        source: Any = node.args[0]
        shape = value(source).shape
        if dropped or not same_axes(shape[-self.row_axes :], self.domain[-self.row_axes :]):
            raise UnfitError("a reduction of what is broadcast to the row")
        if source in self.known and self.known[source].value.of_row:
            raise UnfitError("a reduction of what is broadcast to the row")

    def _is_dropped(self, node: fx.Node) -> bool:
        """Whether a tensor of a node that reads no other of the block has no axes of the row."""
        shape = value(node).shape
        return bool(self.row_axes) and not self._aligned(shape) and same_axes(shape, self.domain[: -self.row_axes])

    def _aligned(self, shape: Sequence[Any]) -> bool:
        """Whether broadcasting puts a shape into the domain."""
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        if len(shape) > len(self.domain):
            return False
        pairs = zip(shape, self.domain[len(self.domain) - len(shape) :], strict=True)
        return all(_is_one(mine) or statically_known_true(mine == whole) for mine, whole in pairs)

    def _operand(self, node: fx.Node, dropped: bool) -> Value:
        placed = self.known.get(node)
        if placed is not None:
            if placed.dropped != dropped and value(node).ndim:
                raise UnfitError("a reduction without its axes beside what has them")
            return placed.value
        shape = value(node).shape
        fits = same_axes(shape, self.domain[: -self.row_axes]) if dropped and len(shape) else self._aligned(shape)
        if not fits:
            raise UnfitError("an operand of another shape")
        operand = Operand(node, dropped and len(shape) > 0)
        if operand not in self.loads:
            self.loads[operand] = self.expression.load(of_row=self._of_row(operand, shape))
        return self.loads[operand]

    def _of_row(self, operand: Operand, shape: Sequence[Any]) -> bool:
        """Whether an operand has one number for each row."""
        if operand.dropped:
            return True
        inner = [_is_one(size) for size in shape[-max(1, self.row_axes) :]]
        if not self.domain:
            return False
        if all(inner):
            return not _is_one(self.domain[-1]) or self.row_axes > 0
        if self.row_axes > 1 and (len(inner) < self.row_axes or any(inner)):
            whole = zip(shape[-self.row_axes :], self.domain[-self.row_axes :], strict=False)
            if len(inner) < self.row_axes or not all(same_axes([a], [b]) for a, b in whole):
                raise UnfitError("an operand with a part of the row's axes")
        return False

    def _look(self, node: fx.Node) -> _Placed:
        source: Any = node.args[0]
        if source not in self.known:
            raise UnfitError("a view of an operand stays outside")
        before, shape, placed = value(source).shape, value(node).shape, self.known[source]
        if placed.dropped:
            kept = (*self.domain[: -self.row_axes], *[1] * self.row_axes)
            if same_axes(shape, before):
                return placed
            if same_axes(shape, kept):
                return _Placed(placed.value)
            raise UnfitError("a reduction seen under another shape")
        short = [size for size in before if not _is_one(size)]
        leading = len(shape) >= len(before) and same_axes(shape[len(shape) - len(before) :], before)
        if leading and all(map(_is_one, shape[: len(shape) - len(before)])):
            return placed
        if node.target in (aten.expand.default, aten.expand_as.default) and self._aligned(shape):
            return placed
        dropping = placed.value.of_row and self.row_axes and same_axes(shape, self.domain[: -self.row_axes])
        if dropping and len(short) == len([size for size in shape if not _is_one(size)]):
            return _Placed(placed.value, dropped=True)
        raise UnfitError("a view that moves values to other places")

    def _stored(self, node: fx.Node) -> Operand:
        shape, made, wanted, dropped = value(node).shape, self.known[node].value, self.domain, False
        if made.of_row:
            count = max(1, self.row_axes)
            dropped = bool(self.row_axes) and len(shape) == len(self.domain) - count
            wanted = (*self.domain[:-count], *[1] * (0 if dropped else count))
        if not same_axes(shape, wanted):
            raise UnfitError("others read a tensor smaller than the domain")
        self.expression.store(made)
        return Operand(node, dropped)


def _reduces(node: fx.Node) -> bool:
    return node.target in REDUCTIONS or node.target in WHOLE_ROWS


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
