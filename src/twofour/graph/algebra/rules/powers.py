"""Reciprocals and exponentials that are multiplied become one."""

from __future__ import annotations

from twofour.graph.algebra.expressions import call, tensors
from twofour.graph.algebra.rule import CLOSE, Rule

A, B = tensors("A B")


POWERS: tuple[Rule, ...] = (
    Rule(
        "reciprocals multiplied",
        call("recip", A) * call("recip", A * B),
        call("recip", call("square", A) * B),
        CLOSE,
        "A^2 and A^2 B of magnitudes from 2^-126 to 2^127: outside a reciprocal becomes 0, infinite or NaN",
        "4 u of the result; before, 4 u",
        "a reciprocal",
    ),
    Rule(
        "exponentials multiplied",
        call("exp", A) * call("exp", B),
        call("exp", A + B),
        CLOSE,
        "every value; exponentials that overflowed or vanished alone no longer do",
        "(3 + |A + B|) u of the result; before, 3 u",
        "an exponential",
    ),
    Rule(
        "exponentials divided",
        call("exp", A) / call("exp", B),
        call("exp", A - B),
        CLOSE,
        "every value; exponentials that overflowed or vanished alone no longer do",
        "(3 + |A - B|) u of the result; before, 3 u",
        "an exponential",
    ),
)
