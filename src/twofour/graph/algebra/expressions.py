"""Expressions that rules are written in: `A @ B + A @ C` is a pattern, and `A @ (B + C)` what replaces it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Expr:
    """A variable, a number or a call; Python's operators make calls."""

    def __add__(self, other: Any) -> Call:
        return Call("add", (self, expression(other)))

    def __radd__(self, other: Any) -> Call:
        return Call("add", (expression(other), self))

    def __sub__(self, other: Any) -> Call:
        return Call("sub", (self, expression(other)))

    def __rsub__(self, other: Any) -> Call:
        return Call("sub", (expression(other), self))

    def __mul__(self, other: Any) -> Call:
        return Call("mul", (self, expression(other)))

    def __rmul__(self, other: Any) -> Call:
        return Call("mul", (expression(other), self))

    def __truediv__(self, other: Any) -> Call:
        return Call("div", (self, expression(other)))

    def __rtruediv__(self, other: Any) -> Call:
        return Call("div", (expression(other), self))

    def __matmul__(self, other: Any) -> Call:
        return Call("matmul", (self, expression(other)))

    def __neg__(self) -> Call:
        return Call("neg", (self,))


@dataclass(frozen=True, eq=False)
class Var(Expr):
    """Stands for any value; the same name twice stands for the same value.

    Attributes:
        name: What the text of the rule calls it.
        kind: "tensor" of the root's dtype, "number" of Python, "weight": a constant of the model, "vector": one of
            one axis, "bias": either or nothing.
    """

    name: str
    kind: str = "tensor"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Number(Expr):
    """A number written in the rule, or None: a bias that is missing."""

    value: float | None

    def __str__(self) -> str:
        return "none" if self.value is None else f"{self.value:g}"


_SIGNS = {"add": (" + ", 1), "sub": (" - ", 1), "mul": (" * ", 2), "div": (" / ", 2), "matmul": (" @ ", 2)}


@dataclass(frozen=True, eq=False)
class Call(Expr):
    """An operator of `vocabulary` on expressions. The reductions of one rule all go over the same axes."""

    op: str
    args: tuple[Expr, ...]

    def __str__(self) -> str:
        if self.op not in _SIGNS:
            return f"-{self.args[0]}" if self.op == "neg" else f"{self.op}({', '.join(map(str, self.args))})"
        sign, strength = _SIGNS[self.op]
        parts = [self._inside(entry, strength, index) for index, entry in enumerate(self.args)]
        return sign.join(parts)

    def _inside(self, entry: Expr, strength: int, index: int) -> str:
        weaker = isinstance(entry, Call) and entry.op in _SIGNS and _SIGNS[entry.op][1] < strength + (index > 0)
        same = isinstance(entry, Call) and entry.op == self.op and self.op in ("add", "mul")
        return f"({entry})" if weaker and not same else str(entry)


def expression(value: Any) -> Expr:
    """Return a number as an expression, an expression as it is."""
    return value if isinstance(value, Expr) else Number(value)


def call(op: str, *args: Any) -> Call:
    """Return the call of an operator that Python has no sign for."""
    return Call(op, tuple(map(expression, args)))


def tensors(names: str) -> list[Var]:
    """Return variables for tensors."""
    return [Var(name) for name in names.split()]


def numbers(names: str) -> list[Var]:
    """Return variables for Python's numbers."""
    return [Var(name, "number") for name in names.split()]


def weights(names: str) -> list[Var]:
    """Return variables for constants of the model, but for those of one axis, which F.linear takes too."""
    return [Var(name, "weight") for name in names.split()]


def vectors(names: str) -> list[Var]:
    """Return variables for constants of the model with one axis."""
    return [Var(name, "vector") for name in names.split()]


def biases(names: str) -> list[Var]:
    """Return variables for biases, which may be missing."""
    return [Var(name, "bias") for name in names.split()]
