"""A rewriting rule: what it finds, what it puts there, where that holds, how far off it may be, what it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from twofour.errors import CompileError
from twofour.graph.algebra.expressions import Expr

EXACT, CLOSE = "exact", "close"
RULES = (EXACT, CLOSE)
"""What `rules=` may be: docs/rewriting.md defines both."""

HEADROOM = 32
"""An exact rule makes no number overflow whose variables are below 2^HEADROOM in magnitude. The largest number of
float16 is 65,504: there only rules hold that keep every bit."""

SAME_BITS = "0, bit for bit"
"""The error of such a rule."""


@dataclass(frozen=True)
class Match:
    """One place a rule was found at.

    Attributes:
        root: The node whose value is replaced.
        values: Variable -> node, number or None.
        inner: Nodes the pattern was read off, the root among them.
        over: Axes of its reductions, and whether they are kept.
        rest: Terms of a sum or product at the root that the pattern does not speak of.
        joined: Operator of the root where there are such terms.
    """

    root: fx.Node
    values: dict[str, Any] = field(default_factory=dict)
    inner: tuple[fx.Node, ...] = ()
    over: tuple[tuple[int, ...], bool] | None = None
    rest: tuple[Any, ...] = ()
    joined: str = ""


@dataclass(frozen=True)
class Candidate:
    """A replacement that could be made.

    Attributes:
        root: The node whose value is replaced.
        inner: Nodes it was read off.
        build: Writes the new value before the root, by a `Builder`.
        why_not: Why it may not be made although it would save, "" where it may.
    """

    root: fx.Node
    inner: tuple[fx.Node, ...]
    build: Callable[[Any], Any]
    why_not: str = ""


@dataclass(frozen=True)
class Rule:
    """One rule, as declared.

    Attributes:
        name: What the plan calls it.
        before: The pattern; a text where `find` reads it off the graph itself.
        after: What replaces it, likewise.
        kind: "exact" or "close".
        domain: Where it holds, as text: types, signs, what is finite.
        bound: Largest error against real arithmetic, as text; u is the unit roundoff of the type.
        saves: What it saves, as text.
        dtypes: "floats", "integers" or "any".
        where: Says why a match is outside of the domain, "" inside.
        find: Yields candidates at a node, of a rule that is no single pattern.
    """

    name: str
    before: Expr | str
    after: Expr | str
    kind: str
    domain: str
    bound: str
    saves: str
    dtypes: str = "floats"
    where: Callable[[Match], str] | None = None
    find: Callable[[fx.Node], Iterator[Candidate]] | None = None


def require_rules(rules: str) -> None:
    """Raise CompileError unless `rules` is one of `RULES`."""
    if rules not in RULES:
        raise CompileError(
            "the rules are not known",
            got=repr(rules),
            wanted=" or ".join(map(repr, RULES)),
            remedy="leave it out: exact rules keep the domain of real arithmetic",
        )
