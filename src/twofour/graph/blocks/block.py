"""A fused block as a module: the native program, its operands' views, the memory of its answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour import native
from twofour.errors import KernelError
from twofour.graph.blocks.lowering import Lowered, Operand, is_look
from twofour.graph.program import Program
from twofour.kernels.fused_block import program

logger = logging.getLogger("twofour.compiler")

MOST_SIZES = 64
"""Sizes of operands whose answers' layouts are kept."""

MOST_AXES = 7
"""Axes that a program goes through however its operands lie (`kOuterAxes` and the row)."""

_NEW: Any = object()
"""In place of layouts that are not known yet."""

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Seen:
    """How a block sees the tensor at an index; see `lowering.Operand`."""

    index: int
    dropped: bool
    order: tuple[int, ...]
    row_axes: int
    part: int | None
    parts: int
    alternate: bool
    stacked: bool

    @classmethod
    def of(cls, index: int, operand: Operand, lowered: Lowered) -> _Seen:
        inverse = tuple(operand.order.index(axis) for axis in range(len(operand.order)))
        of_parts = operand.part, lowered.parts, lowered.alternate, operand.stacked
        return cls(index, operand.dropped, inverse, lowered.row_axes, *of_parts)

    def __call__(self, x: Tensor, *, view: bool = False) -> Tensor:
        """Return the tensor as the domain has it, the row as its last axis; `view`: never a copy."""
        if self.order:
            x = x[(None,) * (len(self.order) - x.ndim)].permute(self.order)
        if self.part is not None and self.alternate:
            return x.select(-1, self.part) if self.stacked else x[..., self.part :: self.parts]
        if self.part is not None:
            width = x.shape[-1] // self.parts
            return x.narrow(-1, self.part * width, width)
        if self.dropped:
            return x.unsqueeze(-1)
        if self.row_axes > 1 and x.ndim >= self.row_axes:
            return x.view(*x.shape[: -self.row_axes], -1) if view else x.flatten(-self.row_axes)
        return x


class FusedBlock(nn.Module):
    """Operators of a graph as one native call.

    The answers have the shapes, strides and types that the operators' own would have: their reference is asked for that
    on tensors without data, once for each kind of operands.

    Args:
        nodes: In the graph's order, a convex set.
        lowered: The same as an expression; `forward` takes `sources_of` it.
    """

    def __init__(self, nodes: Sequence[fx.Node], lowered: Lowered) -> None:
        super().__init__()
        sources = sources_of(lowered)
        self.reference = reference(nodes, sources, lowered.answers)
        self.label = label(nodes)
        self.operators = sum(not is_look(node) for node in nodes)
        self.expression = lowered.expression
        self.row_axes = lowered.row_axes
        self._inputs = [_Seen.of(sources.index(one.node), one, lowered) for one in lowered.inputs]
        self._outputs = [_Seen.of(lowered.answers.index(one.node), one, lowered) for one in lowered.outputs]
        self._layouts: dict[Any, list[Layout] | None] = {}

    @cached_property
    def program(self) -> Any:
        """The native program."""
        return program(self.expression)

    def forward(self, *operands: Tensor) -> Any:
        """Return the answer, or the tuple of them."""
        if any([x.is_neg() for x in operands]):
            operands = tuple([x.resolve_neg() for x in operands])  # memory holds the numbers without their sign
        key = tuple([(x.shape, x.stride(), x.dtype) for x in operands])
        layouts = self._layouts.get(key, _NEW)
        if layouts is _NEW:
            layouts = self._laid_out(key, operands)
        if layouts is None:
            return self.unfused(*operands)
        outputs = [torch.empty_strided(*layout[:2], dtype=layout[2], device="cpu") for layout in layouts]
        self.run(operands, outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def run(self, operands: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Compute into tensors that are there, of the layouts that `forward` makes."""
        self.bound(operands, outputs)()

    def bound(self, operands: Sequence[Tensor], outputs: Sequence[Tensor]) -> Callable[[], None]:
        """Return the native call on these tensors: what a replay of the graph makes, whose views are made once."""
        inputs = [seen(operands[seen.index]) for seen in self._inputs]
        answers = [seen(outputs[seen.index]) for seen in self._outputs]
        return partial(self.program.run, native.best("fused_block").index, inputs, answers, native.threads())

    def unfused(self, *operands: Tensor) -> Any:
        """Return what the operators answer one by one."""
        found = self.reference(*operands)
        return found[0] if len(found) == 1 else found

    def _laid_out(self, key: Any, operands: Sequence[Tensor]) -> list[Layout] | None:
        """Return the answers' layouts for such operands, None where the operators themselves must run."""
        if len(self._layouts) >= MOST_SIZES:
            self._layouts.clear()
        empty = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in operands]
        with torch.inference_mode():
            made = self.reference(*empty)
        layouts: list[Layout] | None = [(y.shape, y.stride(), y.dtype) for y in made]
        if not all(x.numel() for x in operands):
            layouts = None  # a reduction of nothing is torch's to answer
        elif why := self._misfit(made) or self._too_many_axes(operands, made):
            logger.warning("%s runs unfused on %s: %s", self.label, [tuple(x.shape) for x in operands], why)
            layouts = None
        self._layouts[key] = layouts
        return layouts

    def _misfit(self, made: Sequence[Tensor]) -> str:
        """Return why answers of these layouts cannot be written by the program, "" where they can."""
        for seen in self._outputs:
            try:
                answer = seen(made[seen.index], view=True)
            except RuntimeError:  # the view does not exist
                return (
                    f"the rows of an answer, its last {self.row_axes} axes, are not one run of memory (channels last)"
                )
            if any(stride == 0 and size > 1 for size, stride in zip(answer.shape, answer.stride(), strict=True)):
                return "an answer whose values share memory"
        return ""

    def _too_many_axes(self, operands: Sequence[Tensor], made: Sequence[Tensor]) -> str:
        """Return why the program cannot go through operands that lie so differently, "" where it can: it is asked."""
        if max(x.ndim for x in operands) <= MOST_AXES:
            return ""
        try:
            self.run(operands, [torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="cpu") for y in made])
        except KernelError as error:
            return f"{error.what}: {error.got}"
        return ""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("program", None)
        return {**state, "_layouts": {}}


def reference(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Program:
    """Return nodes as a program of their own operators, of these inputs and outputs."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"operand_{index}") for index, node in enumerate(inputs)}

    def copied(node: fx.Node) -> fx.Node:
        """Return a node's copy, of a slice that the block takes itself too."""
        if node not in copies:
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for node in nodes:
        copied(node)
    graph.output(tuple(copies[node] for node in outputs))
    holder: Any = nn.Module()
    holder.graph = graph  # a GraphModule would write Python for it
    return Program(holder)


def label(nodes: Sequence[fx.Node], shown: int = 6) -> str:
    """Return what the plan calls a block: its operators in order, equal neighbours once."""
    names = [str(node.target).split(".")[1] for node in nodes if not is_look(node)]
    names = [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]
    more = f" + {len(names) - shown} more" if len(names) > shown else ""
    return f"block: {' + '.join(names[:shown])}{more}"


def sources_of(lowered: Lowered) -> list[fx.Node]:
    """Return the nodes that a block reads, each once."""
    return list(dict.fromkeys(operand.node for operand in lowered.inputs))


def stored(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes whose tensors others need; a view that others need, they take again of what it looks at."""
    inside = set(nodes)
    wanted: dict[fx.Node, None] = {}
    for node in nodes:
        if any(user not in inside for user in node.users):
            while is_look(node) and node.args[0] in inside:
                node = node.args[0]  # pyright: ignore
            wanted[node] = None
    return list(wanted)
