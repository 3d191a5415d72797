"""One operator of a captured graph, as the rules see it: its arguments by name, and the axes of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from twofour.structure.coupling.axes import Atom, Axis, unify

Axes = list[Axis]
Value = Axes | list[Axes]
"""The axes of a tensor, or of each tensor of several."""


@dataclass
class Call:
    """An operator with its arguments.

    Attributes:
        node: The node of the graph.
        named: Arguments by the schema's names, defaults included.
        values: The axes of every tensor before it.
        bars: (axes, normalised axes): an order of the former may not depend on the latter's index.
    """

    node: fx.Node
    named: dict[str, Any]
    values: Mapping[fx.Node, Value]
    bars: list[tuple[Axis, Axis]]

    def __getitem__(self, name: str) -> Any:
        return self.named.get(name)

    def axes(self, name: str) -> Axes:
        """Return the axes of the tensor argument."""
        return self.of(self.named[name])

    def of(self, node: fx.Node) -> Axes:
        """Return the axes of a tensor."""
        return cast(Axes, self.values[node])

    def given(self, name: str) -> bool:
        """Whether the argument is a tensor."""
        return isinstance(self.named.get(name), fx.Node)

    def operands(self) -> list[Axes]:
        """Return the axes of every tensor among the arguments."""
        return [self.of(node) for node in self.node.all_input_nodes if isinstance(node.meta.get("val"), Tensor)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the answer, or of its first tensor."""
        return self.shapes[0]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Sizes of every tensor of the answer."""
        value = self.node.meta.get("val")
        tensors = [value] if isinstance(value, Tensor) else list(value) if isinstance(value, Iterable) else []
        return [tuple(int(size) for size in t.shape) if isinstance(t, Tensor) else () for t in tensors]

    def axis(self, dim: int, ndim: int) -> int:
        """Return a dimension counted from the front."""
        return dim % max(ndim, 1)

    def pair(self, first: Axis, second: Axis) -> None:
        """Make two axes one, where neither is broadcast."""
        if size_of(first) != 1 and size_of(second) != 1:
            unify(first, second)


def size_of(axis: Axis) -> int:
    """Return the size of an axis."""
    size = 1
    for atom in axis:
        size *= atom.size
    return size


def fresh(size: int, reason: str = "") -> Axis:
    """Return a new axis; fixed, where there is a reason."""
    return [Atom(size, reason)] if size != 1 else []


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator by the names of its schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    found |= {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
    return found | dict(node.kwargs)
