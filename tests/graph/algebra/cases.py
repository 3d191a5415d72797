"""One model for each rule, with the error that the rule states, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

U = 2.0**-24
"""Unit roundoff of float32."""


class Of(nn.Module):
    """A function of inputs and weights as a model."""

    def __init__(self, function: Callable[..., Any], inputs: int, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.function = function
        self.held = nn.ParameterList(weights)
        self.count = inputs

    def forward(self, a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Any:
        return self.function(*[x for x in (a, b, c) if x is not None], *self.held)


@dataclass(frozen=True)
class Case:
    """A model that a rule rewrites.

    Attributes:
        function: Of the inputs, then the weights.
        inputs: Shapes of the inputs.
        error: The rule's bound on the result, from the same arguments in float64.
        weights: Shapes of the weights.
        bitwise: The result is the same bit for bit, NaN included.
        dtype: Of the inputs.
    """

    function: Callable[..., Tensor]
    inputs: tuple[tuple[int, ...], ...]
    error: Callable[..., Any] = lambda *_: 0.0
    weights: tuple[tuple[int, ...], ...] = ()
    bitwise: bool = False
    dtype: torch.dtype = field(default=torch.float32)

    def model(self) -> Of:
        return Of(self.function, len(self.inputs), [0.3 * torch.randn(shape) for shape in self.weights]).eval()

    def values(self, scale: float = 1.0) -> list[Tensor]:
        if not self.dtype.is_floating_point:
            return [torch.randint(-50, 50, shape, dtype=self.dtype) for shape in self.inputs]
        return [scale * torch.randn(shape, dtype=self.dtype) for shape in self.inputs]


def _two(x: Tensor, y: Tensor) -> Tensor:
    return x.abs() + y.abs()


WIDE = 300
ONE, PAIR, THREE = ((5, 7),), ((5, 7), (5, 7)), ((5, 7), (5, 7), (5, 7))
MATRICES = ((5, 7), (7, 6), (7, 6))
ROWS = ((2, 9, 16),)

IDENTITIES: dict[str, Case] = {
    "times one": Case(lambda a: (a * 1).sin(), ONE, bitwise=True),
    "divided by one": Case(lambda a: (a / 1).sin(), ONE, bitwise=True),
    "minus zero": Case(lambda a: (a - 0).sin(), ONE, bitwise=True),
    "plus zero": Case(lambda a: (a + 0).sin(), ONE),
    "negated twice": Case(lambda a: a.neg().neg().sin(), ONE, bitwise=True),
    "absolute twice": Case(lambda a: a.abs().abs(), ONE, bitwise=True),
    "absolute of the negated": Case(lambda a: (-a).abs(), ONE, bitwise=True),
    "square of the absolute": Case(lambda a: a.abs().square(), ONE, bitwise=True),
    "square of the negated": Case(lambda a: (-a).pow(2), ONE, bitwise=True),
    "relu twice": Case(lambda a: a.relu().relu(), ONE, bitwise=True),
    "reciprocal twice": Case(lambda a: a.reciprocal().reciprocal().abs(), ONE, lambda a: 2 * U * a.abs()),
    "root of a square": Case(lambda a: a.square().sqrt(), ONE),
    "square of a root": Case(lambda a: a.abs().sqrt().square(), ONE),
    "root times itself": Case(
        lambda a, b, c: (a * b.abs().sqrt()) * (b.abs().sqrt() * c), THREE, lambda a, b, c: 3 * U * (a * b * c).abs()
    ),
    "reciprocal of a root": Case(lambda a: 1 / a.sqrt(), ONE, lambda a: 2 * U * a.abs().rsqrt()),
    "logarithm of an exponential": Case(lambda a: a.exp().log().sin(), ONE),
    "exponential of a logarithm": Case(lambda a: a.abs().log().exp(), ONE),
    "logarithm of a softmax": Case(
        lambda a: a.softmax(-1).log(), ONE, lambda a: 4 * U * (1 + a.softmax(-1).log().abs() + a.abs())
    ),
    "exponential of a log-softmax": Case(
        lambda a: a.log_softmax(-1).exp(), ONE, lambda a: 4 * U * a.softmax(-1) * (1 + a.abs())
    ),
}

ELEMENT_WISE: dict[str, Case] = {
    "computed twice": Case(lambda a: a.exp() * a.exp().sin(), ONE, bitwise=True),
    "shared factor": Case(lambda a, b, c: a * c + b * c, THREE, lambda a, b, c: 2 * U * _two(a * c, b * c)),
    "shared factor of a difference": Case(
        lambda a, b, c: a * c - c * b, THREE, lambda a, b, c: 2 * U * _two(a * c, b * c)
    ),
    "shared number": Case(lambda a, b: a * 3.7 + b * 3.7, PAIR, lambda a, b: 2 * U * 3.7 * _two(a, b)),
    "term times one plus": Case(lambda a, b: a + a * b, PAIR, lambda a, b: 2 * U * _two(a, a * b)),
    "square less a multiple": Case(
        lambda a, b, c: (a + b) ** 2 - (a + b) * c,
        THREE,
        lambda a, b, c: 4 * U * (_two(a, b) * (_two(a, b) + c.abs())),
    ),
    "absolute values multiplied": Case(
        lambda a, b, c: a.abs() * b * c.abs(), THREE, lambda a, b, c: 2 * U * (a * b * c).abs()
    ),
    "reciprocals multiplied": Case(
        lambda a, b: a.reciprocal() * (a * b).reciprocal(), PAIR, lambda a, b: 4 * U / (a * a * b).abs()
    ),
    "exponentials multiplied": Case(
        lambda a, b: a.exp() * b.exp(), PAIR, lambda a, b: U * (3 + (a + b).abs()) * (a + b).exp()
    ),
    "exponentials divided": Case(
        lambda a, b: a.exp() / b.exp(), PAIR, lambda a, b: U * (3 + (a - b).abs()) * (a - b).exp()
    ),
}

SUMS: dict[str, Case] = {
    "product of exponentials": Case(
        lambda a: a.exp().prod(-1),
        ((5, 40),),
        lambda a: U * (2 + a.shape[-1] * a.abs().sum(-1)) * a.sum(-1).exp(),
    ),
    "sum of shifted integers": Case(lambda a: (a << 3).sum(-1), ((5, WIDE),), bitwise=True, dtype=torch.int64),
    "factors that are one sum": Case(
        lambda a, b, c: (a * b.sum(-1, True)) * (b.sum(-1, True) * c),
        THREE,
        lambda a, b, c: U * (a * c).abs() * b.abs().sum(-1, True) ** 2 * 2 * (b.shape[-1] + 2),
    ),
}
for _kind in ("sum", "mean"):
    SUMS |= {
        f"{_kind} of a multiple": Case(
            lambda a, kind=_kind: getattr(a * 3.7, kind)(-1),
            ((5, WIDE),),
            lambda a: (WIDE + 1) * U * 3.7 * a.abs().sum(-1),
        ),
        f"{_kind} of a scaled tensor": Case(
            lambda a, b, kind=_kind: getattr(a * b, kind)(-1, True),
            ((5, WIDE), (5, 1)),
            lambda a, b: (WIDE + 1) * U * (a * b).abs().sum(-1, True),
        ),
        f"{_kind} of a linear layer's rows": Case(
            lambda a, w, *b, kind=_kind: getattr(linear(a, w, *b), kind)(1),
            ROWS,
            lambda a, w, *b: 26 * U * (linear(a.abs(), w.abs(), *(x.abs() for x in b))).sum(1),
            ((24, 16),) if _kind == "sum" else ((24, 16), (24,)),
        ),
        f"{_kind} of a product's rows": Case(
            lambda a, b, kind=_kind: getattr(a @ b, kind)(1),
            ((2, 9, 16), (16, 24)),
            lambda a, b: 26 * U * (a.abs() @ b.abs()).sum(1),
        ),
    }


def _twice(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return 2 * (a.shape[-1] + 2) * U * (a.abs() @ _two(b, c))


def _left(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return 2 * (a.shape[-2] + 2) * U * (_two(b, c) @ a.abs())


PRODUCTS: dict[str, Case] = {
    "shared left operand": Case(lambda a, b, c: a @ b + a @ c, MATRICES, _twice),
    "shared right operand": Case(lambda a, b, c: b @ a + c @ a, ((7, 6), (5, 7), (5, 7)), _left),
    "shared left operand of a difference": Case(lambda a, b, c: a @ b - a @ c, MATRICES, _twice),
    "shared right operand of a difference": Case(lambda a, b, c: b @ a - c @ a, ((7, 6), (5, 7), (5, 7)), _left),
    "number out of the left operand": Case(
        lambda a, b: (a * 3.7) @ b, ((9, 70), (70, 4)), lambda a, b: 80 * U * (3.7 * a.abs() @ b.abs())
    ),
    "number out of the right operand": Case(
        lambda a, b: a @ (b * 3.7), ((4, 70), (70, 9)), lambda a, b: 80 * U * (3.7 * a.abs() @ b.abs())
    ),
    "number into the left operand": Case(
        lambda a, b: (a @ b) * 3.7, ((9, 4), (4, 70)), lambda a, b: 8 * U * (3.7 * a.abs() @ b.abs())
    ),
    "number into the right operand": Case(
        lambda a, b: (a @ b) * 3.7, ((70, 4), (4, 9)), lambda a, b: 8 * U * (3.7 * a.abs() @ b.abs())
    ),
    "order of products": Case(
        lambda a, b, c: (a @ b) @ c, ((5, 9), (9, 70), (70, 4)), lambda a, b, c: 90 * U * (a.abs() @ b.abs() @ c.abs())
    ),
    "output layer before attention": Case(
        lambda q, k, v, w, b: linear(scaled_dot_product_attention(q, k, v), w, b),
        ((2, 9, 8), (2, 9, 8), (2, 9, 64)),
        lambda q, k, v, w, b: 200 * U * (linear(v.abs().sum(1, True).expand_as(v), w.abs(), b.abs())),
        ((4, 64), (4,)),
    ),
}

Weights = tuple[tuple[int, ...], ...]
SQUARES: Weights = ((24, 16), (24,), (24, 16), (24,))


def _merged(a: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return 19 * U * (linear(a.abs(), w.abs() + v.abs(), b.abs() + c.abs()))


LINEARS: dict[str, Case] = {
    "number into a weight": Case(
        lambda a, w, b: linear(a, w, b) * 3.7,
        ROWS,
        lambda a, w, b: 20 * U * 3.7 * linear(a.abs(), w.abs(), b.abs()),
        SQUARES[:2],
    ),
    "number of the input into a weight": Case(
        lambda a, w, b: linear(a * 3.7, w, b),
        ROWS,
        lambda a, w, b: 20 * U * linear(3.7 * a.abs(), w.abs(), b.abs()),
        SQUARES[:2],
    ),
    "vector into a weight": Case(
        lambda a, w, b, s: linear(a, w, b) * s,
        ROWS,
        lambda a, w, b, s: 20 * U * s.abs() * linear(a.abs(), w.abs(), b.abs()),
        (*SQUARES[:2], (24,)),
    ),
    "vector of the input into a weight": Case(
        lambda a, w, b, s: linear(a * s, w, b),
        ROWS,
        lambda a, w, b, s: 20 * U * linear((a * s).abs(), w.abs(), b.abs()),
        (*SQUARES[:2], (16,)),
    ),
    "linear layers of one input added": Case(
        lambda a, w, b, v, c: linear(a, w, b) + linear(a, v, c), ROWS, _merged, SQUARES
    ),
    "linear layers of one input subtracted": Case(
        lambda a, w, b, v, c: linear(a, w, b) - linear(a, v, c), ROWS, _merged, SQUARES
    ),
    "one linear layer of two inputs added": Case(
        lambda a, b, w, c: linear(a, w, c) + linear(b, w),
        ROWS * 2,
        lambda a, b, w, c: 2 * 18 * U * linear(_two(a, b), w.abs(), c.abs()),
        SQUARES[:2],
    ),
    "low rank into a weight": Case(
        lambda a, w, b, low, r: linear(a, w, b) + linear(linear(a, low), r),
        ROWS,
        lambda a, w, b, low, r: 19 * U * linear(a.abs(), w.abs() + r.abs() @ low.abs(), b.abs()),
        ((24, 16), (24,), (3, 16), (24, 3)),
    ),
    "low ranks joined": Case(
        lambda a, low, r, p, q: linear(linear(a, low), r) + linear(linear(a, p), q),
        ROWS,
        lambda a, low, r, p, q: 25 * U * linear(a.abs(), r.abs() @ low.abs() + q.abs() @ p.abs()),
        ((3, 16), (24, 3), (2, 16), (24, 2)),
    ),
    "linear layers in a row": Case(
        lambda a, w, b, v, c: linear(linear(a, w, b), v, c),
        ROWS,
        lambda a, w, b, v, c: 18 * U * linear(linear(a.abs(), w.abs(), b.abs()), v.abs(), c.abs()),
        ((24, 16), (24,), (4, 24), (4,)),
    ),
}

LAYOUT: dict[str, Case] = {
    "transposed twice": Case(lambda a: a.transpose(1, 2).permute(2, 0, 1).exp(), ROWS, bitwise=True),
    "reshaped twice": Case(lambda a: a.view(-1, 16).view(-1, 4, 4).exp(), ROWS, bitwise=True),
    "transposed around element-wise operators": Case(
        lambda a: (a.transpose(1, 2).exp() * 2).transpose(2, 1).contiguous().view(18, 16).sin(), ROWS, bitwise=True
    ),
}

CASES: dict[str, Case] = {**IDENTITIES, **ELEMENT_WISE, **SUMS, **PRODUCTS, **LINEARS, **LAYOUT}
