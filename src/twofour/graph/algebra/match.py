"""Patterns on graphs: sums and products are matched as their terms, in any order, with terms left over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from twofour.graph.algebra.expressions import Call, Expr, Number, Var
from twofour.graph.algebra.rule import Match
from twofour.graph.algebra.vocabulary import ASSOCIATIVE, Operation, read
from twofour.graph.base import value

MOST_TERMS = 8
"""Terms of a sum or product that are tried in every order; of a longer one the first."""


def matches(pattern: Expr, node: fx.Node) -> Iterator[Match]:
    """Yield the ways in which a node's value is what the pattern says, with terms left over at the root."""
    found = read(node)
    if not isinstance(pattern, Call) or found is None:
        return
    start = Match(node)
    if pattern.op not in ASSOCIATIVE:
        yield from _match(pattern, node, start)
        return
    if found.op != pattern.op or _inside_another(node, found.op):
        return
    terms, inner = flattened(node)
    for one, used in _terms(list(_flat(pattern)), terms, replace(start, inner=inner), ()):
        rest = tuple(term for index, term in enumerate(terms) if index not in used)
        yield replace(one, rest=rest, joined=found.op if rest else "")


def _match(pattern: Expr, given: Any, so_far: Match) -> Iterator[Match]:
    if isinstance(pattern, Var):
        yield from _bind(pattern, given, so_far)
    elif isinstance(pattern, Number):
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if given is pattern.value is None or (number and given == pattern.value):
            yield so_far
    elif isinstance(pattern, Call):
        found = read(given)
        if found is None or found.op != pattern.op or not _one_type(given, so_far.root):
            return
        if found.over is not None and so_far.over not in (None, found.over):
            return
        so_far = replace(so_far, inner=(*so_far.inner, given), over=found.over or so_far.over)
        if found.op in ASSOCIATIVE:
            terms, inner = flattened(given)
            wanted = list(_flat(pattern))
            if len(terms) == len(wanted):
                so_far = replace(so_far, inner=(*so_far.inner, *inner))
                yield from (one for one, _ in _terms(wanted, terms, so_far, ()))
        else:
            yield from _all(pattern.args, found.operands, so_far)


def _all(patterns: tuple[Expr, ...], operands: tuple[Any, ...], so_far: Match) -> Iterator[Match]:
    if not patterns:
        yield so_far
        return
    for one in _match(patterns[0], operands[0], so_far):
        yield from _all(patterns[1:], operands[1:], one)


def _terms(
    patterns: list[Expr], terms: tuple[Any, ...], so_far: Match, used: tuple[int, ...]
) -> Iterator[tuple[Match, tuple[int, ...]]]:
    """Yield matches of each pattern with a term of its own, and which terms those are."""
    if not patterns:
        yield so_far, used
        return
    for index, term in enumerate(terms[:MOST_TERMS]):
        if index not in used:
            for one in _match(patterns[0], term, so_far):
                yield from _terms(patterns[1:], terms, one, (*used, index))


def _bind(variable: Var, given: Any, so_far: Match) -> Iterator[Match]:
    if variable.name in so_far.values:
        known = so_far.values[variable.name]
        if known is given or (variable.kind == "number" and known == given):
            yield so_far
    elif _is_a(variable.kind, given, so_far.root):
        yield replace(so_far, values={**so_far.values, variable.name: given})


def _is_a(kind: str, given: Any, root: fx.Node) -> bool:
    if kind == "number":
        return isinstance(given, int | float) and not isinstance(given, bool)
    if kind == "bias" and given is None:
        return True
    if kind in ("weight", "vector", "bias"):
        held = isinstance(given, fx.Node) and given.op == "get_attr" and _one_type(given, root)
        return held and (kind == "bias" or (value(given).ndim == 1) == (kind == "vector"))
    return _one_type(given, root)


def _one_type(given: Any, root: fx.Node) -> bool:
    """Tell whether a value is a tensor of the root's type: rules hold in one arithmetic."""
    found, wanted = value(given), value(root)
    return isinstance(found, Tensor) and found.device == wanted.device and found.dtype == wanted.dtype


def _flat(pattern: Call) -> Iterator[Expr]:
    for entry in pattern.args:
        if isinstance(entry, Call) and entry.op == pattern.op:
            yield from _flat(entry)
        else:
            yield entry


def flattened(node: fx.Node) -> tuple[tuple[Any, ...], tuple[fx.Node, ...]]:
    """Return the terms of a sum or product, and the nodes inside it: those of its type that nobody else reads."""
    root, inner = _operation(node), [node]
    terms: list[Any] = []
    for term in root.operands:
        found = read(term)
        if found is not None and found.op == root.op and len(term.users) == 1 and _one_type(term, node):
            more, nodes = flattened(term)
            terms += more
            inner += nodes
        else:
            terms.append(term)
    return tuple(terms), tuple(inner)


def _operation(node: fx.Node) -> Operation:
    found = read(node)
    assert found is not None, node
    return found


def _inside_another(node: fx.Node, op: str) -> bool:
    """Tell whether the node is a term inside a larger sum or product, where it is matched."""
    if len(node.users) != 1:
        return False
    user = next(iter(node.users))
    found = read(user)
    return found is not None and found.op == op and _one_type(user, node) and user.args.count(node) == 1
