"""A factor that terms share is multiplied once: the distributive law on element-wise operators."""

from __future__ import annotations

from twofour.graph.algebra.expressions import call, numbers, tensors
from twofour.graph.algebra.rule import EXACT, Rule

A, B, C = tensors("A B C")
(s,) = numbers("s")

DOMAIN = "every value; of an infinite factor NaN may become an infinity"
TERMS = "2 u of the sum of the terms' magnitudes"

DISTRIBUTION: tuple[Rule, ...] = (
    Rule("shared factor", A * C + B * C, (A + B) * C, EXACT, DOMAIN, TERMS, "a multiplication", "any"),
    Rule("shared factor of a difference", A * C - B * C, (A - B) * C, EXACT, DOMAIN, TERMS, "a multiplication", "any"),
    Rule("shared number", A * s + B * s, (A + B) * s, EXACT, DOMAIN, TERMS, "a multiplication", "any"),
    Rule("term times one plus", A + A * B, A * (B + 1), EXACT, DOMAIN, TERMS, "one reading of A", "any"),
    Rule(
        "square less a multiple",
        call("square", A) - A * C,
        A * (A - C),
        EXACT,
        f"{DOMAIN}; squares that overflowed no longer do",
        TERMS,
        "a multiplication",
        "any",
    ),
    Rule(
        "absolute values multiplied",
        call("abs", A) * call("abs", B),
        call("abs", A * B),
        EXACT,
        "every value",
        "u of the result, as before",
        "an operation",
    ),
)
