"""Products in a row take the order that costs least; a linear layer among them is one more operand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from twofour.graph.algebra.builder import Builder
from twofour.graph.algebra.rule import EXACT, Candidate, Rule
from twofour.graph.algebra.vocabulary import read
from twofour.graph.base import aten, value

LONGEST = 5
"""Operands of a chain of which every order is tried: 14 orders."""


@dataclass(frozen=True)
class _Operand:
    """One matrix of a chain; a linear layer's weight is (out, in), the transpose of what stands in the chain."""

    node: Any
    weight: bool = False


def find(node: fx.Node) -> Iterator[Candidate]:
    """Yield every order of the longest chain of products that ends at a node."""
    found = read(node)
    if found is None or found.op not in ("matmul", "linear") or _inside_another(node):
        return
    operands, inner = _chain(node)
    if not 2 < len(operands) <= LONGEST:
        return
    bias = found.operands[2] if found.op == "linear" else None
    for order in _orders(0, len(operands)):
        yield Candidate(node, inner, lambda builder, order=order: _built(builder, operands, order, bias))


def _inside_another(node: fx.Node) -> bool:
    users = list(node.users)
    if len(users) != 1:
        return False
    user = read(users[0])
    return user is not None and user.op in ("matmul", "linear") and node in user.operands[:2] and _is_link(node)


def _is_link(node: Any) -> bool:
    """Tell whether a product of matrices may stand inside a chain: nobody else reads it, nothing is added to it."""
    found = read(node)
    if found is None or found.op not in ("matmul", "linear") or len(node.users) != 1:
        return False
    if any(value(operand).ndim < 2 for operand in found.operands[:2]):
        return False
    return found.op == "matmul" or found.operands[2] is None


def _chain(node: fx.Node) -> tuple[tuple[_Operand, ...], tuple[fx.Node, ...]]:
    found = read(node)
    assert found is not None, node
    left, right = found.operands[:2]
    if any(value(operand).ndim < 2 for operand in (left, right)):
        return (), ()
    operands: list[_Operand] = []
    inner: list[fx.Node] = [node]
    for operand, weight in ((left, False), (right, found.op == "linear")):
        if not weight and _is_link(operand):
            more, nodes = _chain(operand)
            operands, inner = [*operands, *more], [*inner, *nodes]
        else:
            operands.append(_Operand(operand, weight))
    return tuple(operands), tuple(inner)


def _orders(begin: int, end: int) -> Iterator[Any]:
    """Yield the ways to bracket operands `begin` to `end`: a number, or a pair of such."""
    if end - begin == 1:
        yield begin
    for middle in range(begin + 1, end):
        for left in _orders(begin, middle):
            for right in _orders(middle, end):
                yield left, right


def _built(builder: Builder, operands: tuple[_Operand, ...], order: Any, bias: Any) -> Any:
    left, right = order
    a, b = (_part(builder, operands, part) for part in (left, right))
    if b.weight and not a.weight:
        return builder.op("linear", a.node, b.node, bias)
    result = _multiplied(builder, a, b)
    return builder.op("add", _plain(builder, result), bias)


def _part(builder: Builder, operands: tuple[_Operand, ...], order: Any) -> _Operand:
    if isinstance(order, int):
        return operands[order]
    return _multiplied(builder, *(_part(builder, operands, part) for part in order))


def _multiplied(builder: Builder, a: _Operand, b: _Operand) -> _Operand:
    if a.weight and b.weight:
        return _Operand(builder.op("matmul", b.node, a.node), True)
    if b.weight:
        return _Operand(builder.op("linear", a.node, b.node, None))
    return _Operand(builder.op("matmul", _plain(builder, a), b.node))


def _plain(builder: Builder, operand: _Operand) -> Any:
    return builder.op("transpose", operand.node) if operand.weight else operand.node


def find_attention(node: fx.Node) -> Iterator[Candidate]:
    """Yield the linear layer behind one head's attention moved to its values."""
    found = read(node)
    if found is None or found.op != "linear":
        return
    attending: Any = found.operands[0]
    if getattr(attending, "target", None) is not aten.scaled_dot_product_attention.default or len(attending.users) > 1:
        return
    _, weight, bias = found.operands
    q, k, v, *more = attending.args
    if more[1:2] not in ([], [0.0]) or attending.kwargs.get("dropout_p", 0.0) or attending.kwargs.get("enable_gqa"):
        return

    def build(builder: Builder) -> Any:
        narrow = builder.op("linear", v, weight, None)
        attended = builder.call(attending.target, q, k, narrow, *more, **attending.kwargs)
        return builder.op("add", attended, bias)

    yield Candidate(node, (node, attending), build)


CHAINS: tuple[Rule, ...] = (
    Rule(
        "order of products",
        "(A @ B) @ C",
        "A @ (B @ C), and every other order of up to 5 operands",
        EXACT,
        "operands of 2 axes and more; of infinite ones NaN may become an infinity",
        "(k + l + 2) u |A| |B| |C|, k and l terms a sum, as before",
        "products, where a matrix inside the chain is wide",
        find=find,
    ),
    Rule(
        "output layer before attention",
        "linear(attention(Q, K, V), W, b)",
        "attention(Q, K, linear(V, W)) + b",
        EXACT,
        "one head, no dropout; of infinite operands NaN may become an infinity",
        "(k + l + 2) u |P| |V| |W|, P the probabilities, as before",
        "products, where the head is wider than the output",
        find=find_attention,
    ),
)
