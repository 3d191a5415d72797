"""Sums and products along axes that change places with what is done to each value."""

from __future__ import annotations

from twofour.graph.algebra.expressions import biases, call, numbers, tensors, weights
from twofour.graph.algebra.rule import CLOSE, EXACT, SAME_BITS, Match, Rule
from twofour.graph.base import value

A, B, C = tensors("A B C")
(s,) = numbers("s")
(W,) = weights("W")
(b,) = biases("b")

SUMMED = "every value; of an infinite factor NaN may become an infinity"
ADDED = "(n + 1) u of the sum of the terms' magnitudes, n terms, as before"


def _constant_along(match: Match) -> str:
    """Say that a factor differs along the axes of the reduction, or is not as long as them."""
    assert match.over is not None, match
    factor, terms = value(match.values["B"]), value(match.values["A"])
    axes = [axis - terms.ndim for axis in match.over[0]]
    if any(-axis <= factor.ndim and factor.shape[axis] != 1 for axis in axes):
        return "B differs along the axes of the sum"
    lost = factor.ndim > terms.ndim or (factor.ndim > 1 and not match.over[1])
    return "B would have to be given another shape" if lost else ""


def _not_the_last(match: Match) -> str:
    assert match.over is not None, match
    rank = value(match.values["A"]).ndim
    return "" if rank - 1 not in match.over[0] else "the sum is along the features"


def _rows_only(match: Match) -> str:
    if match.values["b"] is not None:
        return "the bias is added once for each row"
    return _not_the_last(match)


def _matrix(match: Match) -> str:
    assert match.over is not None, match
    rank, right = value(match.values["A"]).ndim, value(match.values["B"])
    if right.ndim != 2 or match.over[0] != (rank - 2,):
        return "the sum is not along the rows of one matrix product"
    return ""


def _of_multiples(kind: str) -> tuple[Rule, Rule]:
    saves = "a multiplication for each value"
    one, other = (f"{kind} of a {what}" for what in ("multiple", "scaled tensor"))
    domain = f"{SUMMED}; B does not change along the axes"
    return (
        Rule(one, call(kind, A * s), call(kind, A) * s, EXACT, SUMMED, ADDED, saves),
        Rule(other, call(kind, A * B), call(kind, A) * B, EXACT, domain, ADDED, saves, where=_constant_along),
    )


def _of_products(kind: str) -> tuple[Rule, Rule]:
    rows, and_no_bias = (_rows_only, "; no bias") if kind == "sum" else (_not_the_last, "")
    saves = "the product for all rows but one"
    return (
        Rule(
            f"{kind} of a linear layer's rows",
            call(kind, call("linear", A, W, b)),
            call("linear", call(kind, A), W, b),
            EXACT,
            f"every value; the axes are not that of the features{and_no_bias}",
            "(n + k) u |A| |W|, n rows of k features",
            saves,
            where=rows,
        ),
        Rule(
            f"{kind} of a product's rows",
            call(kind, A @ B),
            call("matmul", call(kind, A), B),
            EXACT,
            "every value; B is one matrix, the axis that of the rows",
            "(n + k) u |A| |B|, n rows of k features",
            saves,
            where=_matrix,
        ),
    )


REDUCTIONS: tuple[Rule, ...] = (
    *(rule for kind in ("sum", "mean") for rule in (*_of_multiples(kind), *_of_products(kind))),
    Rule(
        "product of exponentials",
        call("prod", call("exp", A)),
        call("exp", call("sum", A)),
        CLOSE,
        "every value; exponentials that overflowed or vanished alone no longer do",
        "(2 + n sum |A|) u of the result; before, 2 n u",
        "an exponential for each value",
    ),
    Rule(
        "sum of shifted integers",
        call("sum", call("shift", A, s)),
        call("shift", call("sum", A), s),
        EXACT,
        "64-bit integers: both sides are modulo 2^64, narrower ones are widened by the sum",
        SAME_BITS,
        "a shift for each value",
        "integers",
    ),
    Rule(
        "factors that are one sum",
        (A * call("sum", B)) * (call("sum", B) * C),
        A * call("square", call("sum", B)) * C,
        CLOSE,
        "the square of the sum does not overflow, and is not below 2^-126",
        "4 u of the result, as before",
        "a multiplication for each value",
    ),
)
