"""New nodes for a replacement: written before its root, with the tensors they stand for, folded where constant."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from twofour.graph.algebra.expressions import Call, Expr, Number, Var
from twofour.graph.algebra.rule import Match
from twofour.graph.algebra.signs import attribute, sealed
from twofour.graph.algebra.vocabulary import ASSOCIATIVE, target_of
from twofour.graph.base import aten, constant, same_axes, same_size, value

MERGED = ".merged"
"""Ends the name of what weights were merged into; the name of the first of them stands before it."""

NUMBERS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}


class Builder:
    """Writes a replacement; `undo` takes it back.

    Args:
        root: The node whose value is replaced.

    Attributes:
        nodes: What was written.
        constant: Those of them that depend on weights alone.
        placed: Constant -> the attribute it has become.
    """

    def __init__(self, root: fx.Node) -> None:
        self.root, self.graph = root, root.graph
        self.nodes: list[fx.Node] = []
        self.constant: set[fx.Node] = set()
        self.placed: dict[fx.Node, fx.Node] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add one call of an operator of ATen.

        Raises:
            Exception: Whatever torch raises for operands that do not fit, or that fit for some sizes alone of those
                that the graph serves.
        """
        with self.graph.inserting_before(self.root):
            node = self.graph.call_function(target, args, kwargs)
        self.nodes.append(node)
        node.meta["val"] = _traced(target, args, kwargs)
        if all(source.op == "get_attr" or source in self.constant for source in node.all_input_nodes):
            self.constant.add(node)
        return node

    def op(self, name: str, *operands: Any, over: Any = None) -> Any:
        """Add an operation of the vocabulary: numbers are computed, and a bias that is missing adds nothing."""
        if any(operand is None for operand in operands) and name != "linear":
            return self._without(name, operands)
        if not any(isinstance(operand, fx.Node) for operand in operands):
            return NUMBERS[name](*operands)
        if name in ("add", "mul") and not isinstance(operands[0], fx.Node):
            operands = operands[::-1]
        target, args = target_of(name, operands, over)
        return self.call(target, *args)

    def _without(self, name: str, operands: tuple[Any, ...]) -> Any:
        """Return what an operation is where a bias is missing."""
        present = [operand for operand in operands if operand is not None]
        if not present or name not in ("add", "sub"):
            return None
        return self.op("neg", *present) if name == "sub" and operands[0] is None else present[0]

    def write(self, expr: Expr, match: Match) -> Any:
        """Add what an expression says of a match's values."""
        if isinstance(expr, Var):
            return match.values[expr.name]
        if isinstance(expr, Number):
            return expr.value
        assert isinstance(expr, Call), expr
        operands = [self.write(entry, match) for entry in expr.args]
        if expr.op in ASSOCIATIVE and len(operands) > 2:
            first, *more = operands
            for operand in more:
                first = self.op(expr.op, first, operand)
            return first
        return self.op(expr.op, *operands, over=match.over)

    def undo(self) -> None:
        """Take back everything that was written."""
        for node in reversed(self.nodes):
            self.graph.erase_node(node)
        self.nodes.clear()

    def merged(self) -> list[fx.Node]:
        """Return the weights, not biases, that would be computed from others."""
        return [node for node in self._results() if value(node).ndim > 1]

    def sealed(self) -> str:
        """Return why a constant that is read may not be merged with others, "" where all may."""
        for node in self.nodes:
            sources: list[Any]
            if node in self.constant:
                sources = [] if self._scales(node) else node.all_input_nodes
            elif node.target is aten.linear.default and not self._own_bias(node):
                sources = [node.args[1]]
            else:
                continue
            if why := next((why for source in sources if (why := sealed(source))), ""):
                return why
        return ""

    def _scales(self, node: fx.Node) -> bool:
        """Tell whether a constant is a sealed weight times numbers along one axis: its zeros stay where they are."""
        if node.target not in (aten.mul.Tensor, aten.mul.Scalar):
            return False
        weights = [source for source in node.all_input_nodes if sealed(source)]
        alone = len(weights) == 1 and node.args.count(weights[0]) == 1
        return alone and bool(weights[0].meta.get("scalable")) and same_size(weights[0], node)

    def _own_bias(self, node: fx.Node) -> bool:
        """Tell whether a product adds what its sealed weight's layer adds."""
        weight: Any = node.args[1]
        return (node.args[2] if len(node.args) > 2 else None) is weight.meta.get("bias")

    def fold(self, largest: float) -> str:
        """Compute what is constant, in double precision, and hold it in the graph's module.

        Args:
            largest: Magnitude that no weight may have.

        Returns:
            Why that cannot be done, "" where it was.
        """
        known: dict[fx.Node, Any] = {}
        for node in [node for node in self.nodes if node in self.constant]:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in known:
                    known[source] = _wide(attribute(source).detach())
                    if not bool((known[source].abs() < largest).all()):
                        return f"a weight holds NaN or a magnitude of {largest:g} and more"
            args = map_arg(node.args, known.__getitem__)
            known[node] = node.target(*args)  # pyright: ignore[reportCallIssue]
        made = {node: known[node].to(value(node).dtype).contiguous() for node in self._results()}
        if not all(bool(tensor.isfinite().all()) for tensor in made.values()):
            return "the merged weight overflows"
        for node, tensor in made.items():
            self._place(node, tensor)
        for node in reversed([node for node in self.nodes if node in self.constant]):
            self.graph.erase_node(node)
        self.nodes = [node for node in self.nodes if node not in self.constant]
        return ""

    def _results(self) -> list[fx.Node]:
        """Return the constants that are read by what is none."""
        return [node for node in self.constant if any(user not in self.constant for user in node.users)]

    def _place(self, node: fx.Node, tensor: Tensor) -> None:
        module: Any = self.graph.owning_module
        sources = _sources(node, self.constant)
        name = _unused_name(module, sources, "weight" if tensor.ndim > 1 else "bias")
        names = tuple(name for source in sources for name in source.meta.get("sources", (_name(source),)))
        new = constant(module, node, name, tensor, node.meta["val"], {"weight": name, "sources": names})
        if why := next(filter(None, map(sealed, sources)), ""):
            new.meta |= {"sealed": why, "scalable": True}  # it is a sealed one scaled: see `sealed`
        node.replace_all_uses_with(new)
        self.placed[node] = new


def _traced(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given, named = map_arg((tuple(args), kwargs), lambda node: node.meta["val"])
    if target is aten.linear.default and same_axes(given[0].shape[-1:], given[1].shape[1:]):
        return given[0].new_empty((*given[0].shape[:-1], given[1].shape[0]))  # torch asks whether a size may be 0
    mode = detect_fake_mode([leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)])
    if mode is None:
        return target(*given, **named)
    env = mode.shape_env
    # A guard that is added here is one the captured graph does not have: the new operator would hold for fewer sizes.
    with mode, torch.no_grad(), _quiet(), env.error_on_new_guards() if env is not None else nullcontext():
        return target(*given, **named)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging what it raises as well: a rule is tried on operands that may not fit."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _sources(node: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for source in node.all_input_nodes:
        found += _sources(source, inside) if source in inside else [source]
    return list(dict.fromkeys(found))


def _name(node: fx.Node) -> str:
    return str(node.meta.get("weight") or node.target)


def _unused_name(module: Any, sources: Sequence[fx.Node], ending: str) -> str:
    """Return a name that no attribute has for what was made of weights: that of the first, and that it is merged."""
    first = _name(sources[0]).removesuffix(".weight").removesuffix(".bias") if sources else "constant"
    stem = first.partition(MERGED)[0] + MERGED
    for index in count(1):
        name = f"{stem}{index if index > 1 else ''}.{ending}"
        if not hasattr(module, name.replace(".", "__")):
            return name
    raise AssertionError
