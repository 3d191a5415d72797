"""Fused blocks: expressions over operands of one shape, of the steps that a native kernel interprets.

A tile value has a number for each place of the block's domain, a row value one for each row: what reductions over the
last axis make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from twofour import native
from twofour.errors import KernelError, one_of

_PAIRS = (("sub", "rsub"), ("div", "rdiv"), ("lt", "gt"), ("le", "ge"))
_SAME = ("add", "mul", "maximum", "minimum", "eq", "ne")
SWAPPED = {**dict(_PAIRS), **{b: a for a, b in _PAIRS}, **dict(zip(_SAME, _SAME, strict=True))}
"""What a binary step is called with its operands exchanged: the second may be a number or a row value."""

BEFORE = -1
"""The level of what is known of a row before any loop: inputs of row values and what is made of them alone."""

COUNTS = {"unary": 1, "binary": 2, "ternary": 3, "reduce": 1}
"""How many operands a step of each kind has, of those that compute."""


@cache
def steps() -> dict[str, str]:
    """Return the names of the steps, with their kinds: "unary", "binary", "ternary", "reduce" and more (ops.def)."""
    return dict(native.extension().block_steps)


@dataclass(frozen=True, eq=False)
class Value:
    """What a step computes, once for a place or once for a row.

    Attributes:
        step: Name of the step.
        operands: Values and numbers; of a load the input's index.
        of_row: Whether it is a row value.
        level: The loop of which it is known: row values follow their loop, what reads them is in the next.
    """

    step: str
    operands: tuple[Any, ...]
    of_row: bool = False
    level: int = 0

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """The operands that are values."""
        return tuple(operand for operand in self.operands if isinstance(operand, Value))


@dataclass
class Expression:
    """Collects the values of one block and what it stores; operands are numbered as they will be passed."""

    inputs: int = 0
    stores: list[Value] = field(default_factory=list[Value])
    gathers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Inputs that are tables, and of each the input that chooses its rows."""

    def load(self, *, of_row: bool = False) -> Value:
        """Return the next input's value; `of_row`: it has one number for each row, its last axis being 1."""
        self.inputs += 1
        return Value("load", (self.inputs - 1,), of_row, BEFORE if of_row else 0)

    def gather(self) -> Value:
        """Return rows of a table, the next input (rows, width), as the one after it says: int64 (..., 1), from 0 on."""
        table = self.load()
        self.gathers.append((self.inputs - 1, self.inputs))
        self.inputs += 1
        return table

    def store(self, value: Value) -> int:
        """Make a value the next output; returns the output's index."""
        self.stores.append(value)
        return len(self.stores) - 1

    def apply(self, step: str, *operands: Value | float) -> Value:
        """Return a step of values and numbers.

        Raises:
            KernelError: There is no such step, or it takes other operands.
        """
        known = {name: kind for name, kind in steps().items() if kind in COUNTS}
        one_of("the step of a fused block is not known", step, known, KernelError)
        kind = known[step]
        if len(operands) != COUNTS[kind] or not any(isinstance(operand, Value) for operand in operands):
            got, wanted = f"{step} of {len(operands)}", f"{COUNTS[kind]}, one a value"
            raise KernelError(
                "a step of a fused block has other operands", got=got, wanted=wanted, remedy="see ops.def"
            )
        if kind == "binary" and not isinstance(operands[0], Value):
            return self._exchanged(step, operands)
        values = tuple(operand for operand in operands if isinstance(operand, Value))
        if kind == "reduce":
            return Value(step, operands, of_row=True, level=values[0].level)
        of_row = all(value.of_row for value in values)
        if kind == "ternary":
            operands = values = tuple(self._row(operand) if of_row else self._tile(operand) for operand in operands)
        if kind == "binary" and values[0].of_row and not of_row:
            return self._exchanged(step, operands)
        level = max(value.level + (value.of_row and not of_row) for value in values)
        return Value(step, operands, of_row, level)

    def _exchanged(self, step: str, operands: Sequence[Value | float]) -> Value:
        a, b = operands
        if step in SWAPPED:
            return self.apply(SWAPPED[step], b, a)
        return self.apply(step, self._tile(a), b)

    def _row(self, operand: Value | float) -> Value:
        return operand if isinstance(operand, Value) else Value("fill", (operand,), of_row=True, level=BEFORE)

    def _tile(self, operand: Value | float) -> Value:
        """Return a row value or a number at every place."""
        if isinstance(operand, Value) and not operand.of_row:
            return operand
        if isinstance(operand, Value):
            return Value("add", (Value("fill", (-0.0,)), operand), level=operand.level + 1)  # -0 + x is x, also for -0
        return Value("fill", (operand,))
