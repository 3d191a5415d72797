"""One operator of a captured graph, as the rules see it: its arguments by name, and the axes of its tensors.

A rule says which axes of an operator's tensors are the same channels, and returns the axes of the answer. It has to
hold for every order of every axis that it does not fix: the operator on permuted tensors gives the permuted answer.
What has no rule is fixed, with the operator's name as the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from twofour.structure.coupling.axes import Atom, Axis, fix, unify
from twofour.structure.coupling.axes import size as size_of

Axes = list[Axis]
Value = Axes | list[Axes]
"""The axes of a tensor, or of each tensor of several."""


@dataclass
class Notes:
    """What the rules say of axes beyond which are the same.

    Attributes:
        bars: (axes, normalised axes): an order of the former may not depend on the latter's index.
        normalised: (axis, operator): values are divided by, or made of, all of the axis: fewer channels change them.
        rigid: (axis, reason): any order will do, another size will not.
        counted: (module, axis) of an axis that no tensor has by itself: the groups of a convolution.
    """

    bars: list[tuple[Axis, Axis]] = field(default_factory=list)
    normalised: list[tuple[Axis, str]] = field(default_factory=list)
    rigid: list[tuple[Axis, str]] = field(default_factory=list)
    counted: list[tuple[str, Axis]] = field(default_factory=list)


@dataclass
class Call:
    """An operator with its arguments.

    Attributes:
        node: The node of the graph.
        named: Arguments by the schema's names, defaults included.
        values: The axes of every tensor before it.
        notes: What the rules say beyond axes.
    """

    node: fx.Node
    named: dict[str, Any]
    values: Mapping[fx.Node, Value]
    notes: Notes

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

    @property
    def module(self) -> str:
        """Name of the innermost module whose forward makes the call, "" for the model itself."""
        return module_of(self.node)

    def axis(self, dim: int, ndim: int) -> int:
        """Return a dimension counted from the front."""
        return dim % max(ndim, 1)

    def pair(self, first: Axis, second: Axis) -> None:
        """Make two axes one, where neither is broadcast."""
        if size_of(first) != 1 and size_of(second) != 1:
            unify(first, second)


def module_of(node: fx.Node) -> str:
    """Return the name of the innermost module whose forward makes a node; a second call of it has the same name."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).partition("@")[0] if stack else ""


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


Rule = Callable[[Call], Value]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators of ATen, named with blanks between them."""

    def register(function: Rule) -> Rule:
        RULES.update({f"aten::{name}": function for name in " ".join(names).split()})
        return function

    return register


def fix_all(call: Call, reason: str) -> Value:
    """Keep the order of everything an operator touches."""
    for axes in call.operands():
        for axis in axes:
            fix(axis, reason)
    answers = [[fresh(size, reason) for size in shape] for shape in call.shapes]
    single = isinstance(call.node.meta.get("val"), Tensor) or not answers
    return answers[0] if single and answers else answers
