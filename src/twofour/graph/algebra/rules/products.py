"""Matrix products: operands that are shared, numbers drawn out, and weights merged into one."""

from __future__ import annotations

from twofour.graph.algebra.expressions import biases, call, numbers, tensors, vectors, weights
from twofour.graph.algebra.rule import EXACT, Match, Rule
from twofour.graph.base import same_axes, value

A, B, C = tensors("A B C")
(s,) = numbers("s")
W, V, L, R, P, Q = weights("W V L R P Q")
(S,) = vectors("S")
b, c = biases("b c")

SUMS = "every value; of infinite operands NaN may become an infinity"
MERGED = f"{SUMS}; weights are constants of the model, finite and below 2^32"
TWICE = "2 (k + 2) u |A| (|B| + |C|), k terms a sum"
ROUNDED = "(k + 3) u |A| (|W| + |V|), k terms a sum: less than before"
SCALED = "u of the result more than before, nothing for powers of two"


def _same_size(match: Match) -> str:
    """Say that the sum of two operands would broadcast them."""
    one, other = (value(match.values[name]) for name in ("B", "C"))
    return "" if same_axes(one.shape, other.shape) else "the operands have other sizes"


def _one_axis(match: Match) -> str:
    return "" if value(match.values["S"]).ndim == 1 else "S differs along other axes than the last"


PRODUCTS: tuple[Rule, ...] = (
    Rule("shared left operand", A @ B + A @ C, A @ (B + C), EXACT, SUMS, TWICE, "a product", where=_same_size),
    Rule("shared right operand", B @ A + C @ A, (B + C) @ A, EXACT, SUMS, TWICE, "a product", where=_same_size),
    Rule(
        "shared left operand of a difference",
        A @ B - A @ C,
        A @ (B - C),
        EXACT,
        SUMS,
        TWICE,
        "a product",
        where=_same_size,
    ),
    Rule(
        "shared right operand of a difference",
        B @ A - C @ A,
        (B - C) @ A,
        EXACT,
        SUMS,
        TWICE,
        "a product",
        where=_same_size,
    ),
    Rule("number out of the left operand", (A * s) @ B, (A @ B) * s, EXACT, SUMS, SCALED, "a pass over A"),
    Rule("number out of the right operand", A @ (B * s), (A @ B) * s, EXACT, SUMS, SCALED, "a pass over B"),
    Rule("number into the left operand", (A @ B) * s, (A * s) @ B, EXACT, SUMS, SCALED, "a pass over the result"),
    Rule("number into the right operand", (A @ B) * s, A @ (B * s), EXACT, SUMS, SCALED, "a pass over the result"),
)

LINEARS: tuple[Rule, ...] = (
    Rule(
        "number into a weight",
        call("linear", A, W, b) * s,
        call("linear", A, W * s, b * s),
        EXACT,
        MERGED,
        SCALED,
        "a pass over the result",
    ),
    Rule(
        "number of the input into a weight",
        call("linear", A * s, W, b),
        call("linear", A, W * s, b),
        EXACT,
        MERGED,
        SCALED,
        "a pass over the input",
    ),
    Rule(
        "vector into a weight",
        call("linear", A, W, b) * S,
        call("linear", A, W * call("column", S), b * S),
        EXACT,
        f"{MERGED}; S has one axis",
        SCALED,
        "a pass over the result",
        where=_one_axis,
    ),
    Rule(
        "vector of the input into a weight",
        call("linear", A * S, W, b),
        call("linear", A, W * S, b),
        EXACT,
        f"{MERGED}; S has one axis",
        SCALED,
        "a pass over the input: a norm's gain, singular values",
        where=_one_axis,
    ),
    Rule(
        "linear layers of one input added",
        call("linear", A, W, b) + call("linear", A, V, c),
        call("linear", A, W + V, b + c),
        EXACT,
        MERGED,
        ROUNDED,
        "a product",
    ),
    Rule(
        "linear layers of one input subtracted",
        call("linear", A, W, b) - call("linear", A, V, c),
        call("linear", A, W - V, b - c),
        EXACT,
        MERGED,
        ROUNDED,
        "a product",
    ),
    Rule(
        "one linear layer of two inputs added",
        call("linear", B, W, b) + call("linear", C, W, c),
        call("linear", B + C, W, b + c),
        EXACT,
        SUMS,
        "2 (k + 2) u (|B| + |C|) |W|, k terms a sum",
        "a product",
        where=_same_size,
    ),
    Rule(
        "low rank into a weight",
        call("linear", A, W, b) + call("linear", call("linear", A, L, None), R, c),
        call("linear", A, W + R @ L, b + c),
        EXACT,
        MERGED,
        "(k + 3) u |A| (|W| + |R| |L|), k terms a sum: less than before",
        "two products and a sum: an unmerged LoRA",
    ),
    Rule(
        "low ranks joined",
        call("linear", call("linear", A, L, None), R, b) + call("linear", call("linear", A, P, None), Q, c),
        call("linear", call("linear", A, call("cat", L, P, 0), None), call("cat", R, Q, 1), b + c),
        EXACT,
        MERGED,
        "(k + r + 3) u |A| (|R| |L| + |Q| |P|), k terms a sum, r ranks, as before",
        "two products' calls and a sum: LoRAs beside a weight that must stay as it is",
    ),
    Rule(
        "linear layers in a row",
        call("linear", call("linear", A, W, b), V, c),
        call("linear", A, V @ W, V @ b + c),
        EXACT,
        MERGED,
        "(k + 2) u |A| |W| |V|, k inputs: less than before",
        "a product, where the layers are wider between them than at their ends",
    ),
)
