"""What does nothing, or undoes what was just done."""

from __future__ import annotations

from twofour.graph.algebra.expressions import call, tensors
from twofour.graph.algebra.rule import EXACT, SAME_BITS, Match, Rule
from twofour.graph.algebra.signs import never_negative

(A,) = tensors("A")

ANY = "every value, NaN, infinities and -0.0 among them"

PASS = "one pass over memory"


def _not_negative(match: Match) -> str:
    return "" if never_negative(match.values["A"]) else "A may be negative, where what is left out is NaN"


def _same(name: str, before: object, after: object, dtypes: str = "any") -> Rule:
    return Rule(name, before, after, EXACT, ANY, SAME_BITS, PASS, dtypes)  # pyright: ignore[reportArgumentType]


IDENTITIES: tuple[Rule, ...] = (
    _same("times one", A * 1, A),
    _same("divided by one", A / 1, A, "floats"),
    _same("minus zero", A - 0, A),
    Rule("plus zero", A + 0, A, EXACT, "every value; -0.0 + 0 is +0.0, and stays -0.0", "0", PASS, "any"),
    _same("negated twice", call("neg", call("neg", A)), A),
    _same("absolute twice", call("abs", call("abs", A)), call("abs", A)),
    _same("absolute of the negated", call("abs", call("neg", A)), call("abs", A), "floats"),
    _same("square of the absolute", call("square", call("abs", A)), call("square", A)),
    _same("square of the negated", call("square", call("neg", A)), call("square", A)),
    _same("relu twice", call("relu", call("relu", A)), call("relu", A)),
    Rule(
        "reciprocal twice",
        call("recip", call("recip", A)),
        A,
        EXACT,
        "every value; of magnitudes below 2^-126 the reciprocal overflowed, and no longer does",
        "2 u |A| less than before",
        PASS,
    ),
    Rule(
        "root of a square",
        call("sqrt", call("square", A)),
        call("abs", A),
        EXACT,
        "every value; squares that overflowed or vanished no longer do",
        "0; before, 2 u |A|",
        PASS,
    ),
    Rule(
        "square of a root",
        call("square", call("sqrt", A)),
        A,
        EXACT,
        "A >= 0 or NaN, proven from the graph: of a negative A the root is NaN",
        "0; before, 2 u |A|",
        PASS,
        where=_not_negative,
    ),
    Rule(
        "root times itself",
        call("sqrt", A) * call("sqrt", A),
        A,
        EXACT,
        "A >= 0 or NaN, proven from the graph: of a negative A the root is NaN",
        "0; before, 2 u |A|",
        PASS,
        where=_not_negative,
    ),
    Rule(
        "reciprocal of a root",
        call("recip", call("sqrt", A)),
        call("rsqrt", A),
        EXACT,
        ANY,
        "2 u of the result, as before",
        PASS,
    ),
    Rule(
        "logarithm of an exponential",
        call("log", call("exp", A)),
        A,
        EXACT,
        "every value; exponentials that overflowed or vanished no longer do",
        "0; before, u (1 + |A|)",
        "an exponential and a logarithm",
    ),
    Rule(
        "exponential of a logarithm",
        call("exp", call("log", A)),
        A,
        EXACT,
        "A >= 0 or NaN, proven from the graph: of a negative A the logarithm is NaN",
        "0; before, u |A| (1 + |log A|)",
        "an exponential and a logarithm",
        where=_not_negative,
    ),
    Rule(
        "logarithm of a softmax",
        call("log", call("softmax", A)),
        call("log_softmax", A),
        EXACT,
        "every value; logarithms of probabilities that vanished are finite now",
        "4 u (1 + |result|), as before",
        PASS,
    ),
    Rule(
        "exponential of a log-softmax",
        call("exp", call("log_softmax", A)),
        call("softmax", A),
        EXACT,
        ANY,
        "4 u of the result; before, u |log of it| more",
        PASS,
    ),
)
