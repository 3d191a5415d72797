"""Values that are only looked at in another order or shape: what undoes itself goes, what follows itself is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from twofour.graph.algebra.builder import Builder
from twofour.graph.algebra.rule import EXACT, SAME_BITS, Candidate, Rule
from twofour.graph.algebra.vocabulary import UNARY, read
from twofour.graph.base import aten, same_size, value

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_REORGANIZE = (*_RESHAPES, aten.flatten.using_ints, aten.unsqueeze.default, aten.squeeze.dim, aten.unflatten.int)
_COPIES = (aten.contiguous.default, aten.clone.default)
_OTHER_UNARY = (aten.gelu.default, aten.silu.default, aten.tanh.default, aten.sigmoid.default, aten.erf.default)


def permutation(node: Any) -> tuple[int, ...] | None:
    """Return the axes of its source that a node's axes are, None of what is no transposition."""
    if not isinstance(node, fx.Node) or not isinstance(value(node), Tensor) or node.kwargs:
        return None
    rank = value(node).ndim
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return tuple(dim % rank for dim in dims)
    axes = list(range(rank))
    if node.target is aten.transpose.int:
        one, other = (int(dim) % rank for dim in node.args[1:3])  # pyright: ignore[reportArgumentType]
    elif node.target is aten.t.default and rank == 2:
        one, other = 0, 1
    else:
        return None
    axes[one], axes[other] = axes[other], axes[one]
    return tuple(axes)


def find_transposes(node: fx.Node) -> Iterator[Candidate]:
    """Yield a transposition of a transposition as one, or as none."""
    outer, inner = permutation(node), permutation(node.args[0]) if node.args else None
    if outer is None or inner is None:
        return
    middle: Any = node.args[0]
    source = middle.args[0]
    both = tuple(inner[axis] for axis in outer)
    if both == tuple(range(len(both))):
        yield Candidate(node, (node, middle), lambda builder: source)
    else:
        yield Candidate(node, (node, middle), lambda builder: builder.call(aten.permute.default, source, list(both)))


def find_reshapes(node: fx.Node) -> Iterator[Candidate]:
    """Yield a reshape of a reshape as one, or as none."""
    if node.target not in _REORGANIZE or getattr(node.args[0], "target", None) not in _REORGANIZE:
        return
    middle: Any = node.args[0]
    source: Any = middle.args[0]
    if same_size(source, node):
        yield Candidate(node, (node, middle), lambda builder: source)
    elif node.target in _RESHAPES:
        target = aten.view.default if middle.target is node.target is aten.view.default else aten.reshape.default
        yield Candidate(node, (node, middle), lambda builder: builder.call(target, source, node.args[1]))


def find_past_element_wise(node: fx.Node) -> Iterator[Candidate]:
    """Yield element-wise operators between a transposition and its inverse, without the two."""
    outer = permutation(node)
    between: list[fx.Node] = []
    source: Any = node.args[0] if outer is not None else None
    while isinstance(source, fx.Node) and _element_wise(source) and len(source.users) == 1:
        between.append(source)
        source = source.args[0]
    inner = permutation(source)
    if (
        outer is None
        or inner is None
        or not between
        or tuple(inner[axis] for axis in outer) != tuple(range(len(outer)))
    ):
        return

    def build(builder: Builder) -> Any:
        found = source.args[0]
        for step in reversed(between):
            if step.target not in _COPIES:
                found = builder.call(step.target, found, *step.args[1:], **step.kwargs)
        return found

    yield Candidate(node, (node, *between, source), build)


def _element_wise(node: fx.Node) -> bool:
    """Tell whether a call computes each value of its first operand by itself, whatever its place."""
    if sum(isinstance(given, fx.Node) for given in (*node.args, *node.kwargs.values())) != 1:
        return False  # t * t reads one node, twice
    if node.target in (*UNARY.values(), *_OTHER_UNARY, *_COPIES):
        return True
    found = read(node)
    single = found is not None and found.op in ("add", "sub", "mul", "div")
    return single and isinstance(node.args[0], fx.Node) and value(node.args[0]).ndim == value(node).ndim


LAYOUT: tuple[Rule, ...] = tuple(
    Rule(name, before, after, EXACT, "every value", SAME_BITS, saves, "any", find=find)
    for name, before, after, saves, find in (
        ("transposed twice", "transpose(transpose(A))", "A, or one permute(A)", "a call", find_transposes),
        ("reshaped twice", "reshape(reshape(A))", "A, or one reshape(A)", "a call, or a copy", find_reshapes),
        (
            "transposed around element-wise operators",
            "transpose(f(transpose(A)))",
            "f(A)",
            "two calls, or copies",
            find_past_element_wise,
        ),
    )
)
