"""An expression as a program: its values in loops, each in a register, as the native kernel runs them.

A program is a list of loops over a row's tiles, with steps for the row values between them. Softmax has three: the
largest number of a row; the exponentials, which are kept, and their sum; their quotient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from twofour import native
from twofour.kernels.fused_block.expression import BEFORE, Expression, Value, steps

AGAIN = ("load", "fill")
"""Steps that every loop does for itself: that costs less than to keep what they make."""

Line = tuple[str, int, int, int, int, float]
"""Name of a step, the registers to, a, b and c, and its number."""


def program(expression: Expression) -> Any:
    """Return the native program of what an expression stores; operands are passed in the order of `load` and `store`.

    Raises:
        KernelError: It needs more registers or operands than there are.
    """
    made = Schedule(expression.stores)
    return native.extension().BlockProgram(
        made.lines, made.loops, made.kept, len(made.rows), expression.inputs, len(expression.stores), expression.gathers
    )


class Schedule:
    """The steps of a program in their order.

    Attributes:
        lines: The steps.
        loops: First step, the one after the last, and whether it is of row values, of each loop.
        kept: Of each register, whether later loops read it.
        rows: Row value -> its register.
    """

    def __init__(self, stores: Sequence[Value]) -> None:
        self.lines: list[Line] = []
        self.loops: list[tuple[int, int, bool]] = []
        self.kept: list[bool] = []
        self.rows: dict[Value, int] = {}
        self._stores: dict[Value, list[int]] = {}
        for index, value in enumerate(stores):
            self._stores.setdefault(value, []).append(index)
        values = list(_reachable(stores))
        self._lasting: dict[Value, int | None] = {
            operand: None for value in values for operand in value.values if _is_read_later(operand, value)
        }
        self._readers: dict[Value, list[Value]] = {}
        for value in values:
            for operand in value.values:
                self._readers.setdefault(operand, []).append(value)
        for value in [value for value in self._lasting if self._is_soon_made(value)]:
            del self._lasting[value]
        self._free: list[int] = []
        for level in range(BEFORE, max((value.level for value in values), default=0) + 1):
            here = [value for value in values if value.level == level]
            self._tile_loop(value for value in here if self._is_end(value))
            self._row_loop(value for value in here if value.of_row)

    def _is_end(self, value: Value) -> bool:
        """Whether a loop over tiles computes a value for something outside of it."""
        return _is_reduction(value) or (not value.of_row and (value in self._lasting or value in self._stores))

    def _is_soon_made(self, value: Value) -> bool:
        """Whether a later loop makes a value by one cheap step of another that is kept, LayerNorm's `x - mean`.

        That costs no more than to read it, and a store, which it then needs not, takes as long as two loads.
        """
        sources = [operand for operand in value.values if not operand.of_row]
        if not _is_cheap(value) or value in self._stores or len(sources) != 1:
            return False
        here = [reader for reader in self._readers[value] if reader.level == value.level or _is_reduction(reader)]
        needs_no_store = len(here) <= 1 and all(_is_cheap(reader) or _is_reduction(reader) for reader in here)
        return needs_no_store and sources[0] in self._lasting and not self._is_soon_made(sources[0])

    def _tile_loop(self, ends: Iterable[Value]) -> None:
        begin, order = len(self.lines), _early(list(self._order(ends)))
        last = {operand: index for index, value in enumerate(order) for operand in value.values}
        held: dict[Value, int] = {}
        for index, value in enumerate(order):
            sources = [self._place(operand, held) for operand in value.operands]
            dying = [held.pop(operand) for operand in set(value.values) if operand in held and last[operand] == index]
            # Beside a row value each row is written past its end, so that the first operand must stand elsewhere.
            beside = any(operand.of_row for operand in value.values)
            self._free += [] if beside else dying
            to = self._target(value)
            self._free += dying if beside else []
            self._write(value, to, sources)
            if not value.of_row:
                self._store(value, to)
                if value in last and value not in self._lasting:
                    held[value] = to
                elif value not in self._lasting:
                    self._free.append(to)
        if order:
            self.loops.append((begin, len(self.lines), False))

    def _row_loop(self, values: Iterable[Value]) -> None:
        begin = len(self.lines)
        for value in values:
            if not _is_reduction(value):  # those the loop over tiles has computed
                self._write(value, self._target(value), [self._place(operand, {}) for operand in value.operands])
            self._store(value, self.rows[value])
        if len(self.lines) > begin:
            self.loops.append((begin, len(self.lines), True))

    def _store(self, value: Value, register: int) -> None:
        self.lines += [("store", output, register, 0, 0, 0.0) for output in self._stores.get(value, ())]

    def _order(self, ends: Iterable[Value]) -> Iterator[Value]:
        """Yield what one loop over tiles computes, operands first."""
        seen: set[Value] = set()

        def visit(value: Value) -> Iterator[Value]:
            if value in seen or value in self.rows or self._lasting.get(value) is not None:
                return
            seen.add(value)
            for operand in value.values:
                yield from visit(operand)
            yield value

        for value in ends:
            yield from visit(value)

    def _place(self, operand: Any, held: dict[Value, int]) -> int:
        """Return the register of an operand; `kNumber` of a number."""
        if not isinstance(operand, Value):
            return native.extension().block_number
        lasting = self._lasting.get(operand)
        return self.rows[operand] if operand.of_row else held[operand] if lasting is None else lasting

    def _target(self, value: Value) -> int:
        if value.of_row:
            return self.rows.setdefault(value, native.extension().block_row_register + len(self.rows))
        if self._free and value not in self._lasting:
            return self._free.pop()
        self.kept.append(value in self._lasting)
        if value in self._lasting:
            self._lasting[value] = len(self.kept) - 1
        return len(self.kept) - 1

    def _write(self, value: Value, to: int, sources: Sequence[int]) -> None:
        if value.step == "load":
            self.lines.append(("load", to, value.operands[0], 0, 0, 0.0))
            return
        number = next((float(operand) for operand in value.operands if not isinstance(operand, Value)), 0.0)
        a, b, c = (*sources, 0, 0, 0)[:3] if value.step != "fill" else (0, 0, 0)
        self.lines.append((value.step, to, a, b, c, number))


def _early(order: Sequence[Value]) -> list[Value]:
    """Move loads before the cheap steps that they stand between, which then run as one pass."""
    found = list[Value]()
    for value in order:
        at = len(found)
        while value.step == "load" and at > 0 and _is_cheap(found[at - 1]):
            at -= 1
        found.insert(at, value)
    return found


def _reachable(stores: Sequence[Value]) -> Iterator[Value]:
    """Yield every value that the stored ones come from, each once, operands first."""
    seen: set[Value] = set()
    waiting = [(value, False) for value in reversed(stores)]
    while waiting:
        value, ready = waiting.pop()
        if ready:
            yield value
        elif value not in seen:
            seen.add(value)
            waiting.append((value, True))
            waiting += [(operand, False) for operand in reversed(value.values)]


def _is_cheap(value: Value) -> bool:
    """Whether a value is made inside a pass of others: its step is one of links.def."""
    return not value.of_row and value.step in _links()


@cache
def _links() -> frozenset[str]:
    return frozenset(native.extension().block_links)


def _is_reduction(value: Value) -> bool:
    return steps()[value.step] == "reduce"


def _is_read_later(operand: Value, reader: Value) -> bool:
    """Whether a tile value is read in another loop than its own."""
    return not operand.of_row and operand.step not in AGAIN and operand.level < reader.level
