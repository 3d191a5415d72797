"""streams: which addresses an array asks for in which cycle, fold after fold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from twofour.hardware.systolic.array import SystolicArray, fold_cycles
from twofour.hardware.systolic.operands import NONE, Addresses, Operands

OPERANDS = ("inputs", "weights", "outputs")


@dataclass(frozen=True)
class Stream:
    """What one operand asks for in one fold, in the order in which the memory sees it.

    Attributes:
        lines: Cycle of each request, counted without stalls from the start of the layer.
        addresses: Addresses of the values.
    """

    lines: Addresses
    addresses: Addresses


@dataclass(frozen=True)
class Schedule:
    """The folds of a product on an array, folds down within folds across, as SCALE-Sim runs them.

    Attributes:
        array: The array.
        found: Addresses of the operands.
        block: Rows of a block where each filter keeps its own number of them ("ws" alone).
    """

    array: SystolicArray
    found: Operands
    block: int | None = None

    @property
    def spread(self) -> tuple[int, int, int]:
        """What lies down the array, across it, and streams through it: m, n, kept reduction in some order."""
        m, (k, n) = len(self.found.outputs), self.found.weights.shape
        return {"os": (m, n, k), "ws": (k, n, m), "is": (k, m, n)}[self.array.dataflow]

    @property
    def count(self) -> tuple[int, int]:
        """Folds down and across."""
        down, across, _ = self.spread
        return -(-down // self.array.rows), -(-across // self.array.columns)

    @property
    def length(self) -> int:
        """Cycles of one fold."""
        return fold_cycles(self.array, self.spread[2])

    def used(self) -> Addresses:
        """Return how many units each fold uses, (folds,)."""
        down, across = (
            np.minimum(np.arange(0, size, step) + step, size) - np.arange(0, size, step)
            for size, step in zip(self.spread, (self.array.rows, self.array.columns), strict=False)
        )
        return (across[:, None] * down).reshape(-1)

    def mapped(self) -> Addresses:
        """Return how many units of each fold hold or make a value."""
        if self.block is None:
            return self.used()
        held = (self.found.weights != NONE).astype(np.int64)
        down = np.add.reduceat(held, np.arange(0, len(held), self.array.rows), axis=0)
        return np.add.reduceat(down, np.arange(0, held.shape[1], self.array.columns), axis=1).T.reshape(-1)

    def streams(self, operand: str) -> Iterator[Stream]:
        """Give what each fold asks for of one of `OPERANDS`."""
        return (self.stream(operand, index) for index in range(self.count[0] * self.count[1]))

    def stream(self, operand: str, index: int) -> Stream:
        """Return what a fold asks for of one of `OPERANDS`; the last fold is -1."""
        down, across = self.count
        index %= down * across
        fold_across, fold_down = divmod(index, down)
        rows = slice(fold_down * self.array.rows, (fold_down + 1) * self.array.rows)
        columns = slice(fold_across * self.array.columns, (fold_across + 1) * self.array.columns)
        start = index * self.length
        if operand == "inputs":
            return self._inputs(rows, columns, start)
        return self._weights(rows, columns, start) if operand == "weights" else self._outputs(rows, columns, start)

    def order(self, operand: str) -> Addresses:
        """Return the addresses of inputs or weights in the order in which they are fetched ahead of the folds.

        Folds' operands stand below each other; what enters skewed is taken along the diagonals, what is loaded by rows.
        """
        across = operand == "weights" if self.array.dataflow != "is" else operand == "inputs"
        matrix = self.found.whole if operand == "inputs" and self.block is not None else getattr(self.found, operand)
        lanes = (
            matrix.T
            if (self.array.dataflow, operand) in (("os", "inputs"), ("is", "inputs"), ("is", "weights"))
            else matrix
        )
        step = self.array.columns if across else self.array.rows
        short = -lanes.shape[1] % step
        whole = np.pad(lanes, ((0, 0), (0, short)), constant_values=NONE)
        below = whole.reshape(len(lanes), -1, step).transpose(1, 0, 2).reshape(-1, step)
        if (self.array.dataflow, operand) in (("ws", "weights"), ("is", "inputs")):
            return below[below != NONE]
        return _skewed(below, 0).addresses

    def _inputs(self, rows: slice, columns: slice, start: int) -> Stream:
        if self.array.dataflow == "os":
            return _skewed(self.found.inputs[rows].T, start)
        if self.array.dataflow == "is":
            return _loaded(self.found.inputs.T[rows, columns], self.array.rows, start)
        if self.block is None:
            return _skewed(self.found.inputs[:, rows], start + self.array.rows)
        return self._blocks(self.block, slice(2 * rows.start, 2 * rows.stop), start + self.array.rows)

    def _blocks(self, block: int, reduction: slice, start: int) -> Stream:
        """Two rows of blocks for each row of the array; a row of units reads a whole block of inputs a cycle."""
        inputs = self.found.whole[:, reduction]
        padded = np.full((len(inputs), 2 * self.array.rows), NONE)
        padded[:, : inputs.shape[1]] = inputs
        return _skewed(padded.reshape(len(inputs), -1, block).repeat(block // 2, axis=1), start)

    def _weights(self, rows: slice, columns: slice, start: int) -> Stream:
        if self.array.dataflow == "os":
            return _skewed(self.found.weights[:, columns], start)
        if self.array.dataflow == "ws":
            return _loaded(self.found.weights[rows, columns], self.array.rows, start)
        return _skewed(self.found.weights[rows].T, start + self.array.rows)

    def _outputs(self, rows: slice, columns: slice, start: int) -> Stream:
        ahead = start + 2 * self.array.rows - 1
        if self.array.dataflow == "ws":
            return _skewed(self.found.outputs[:, columns], ahead)
        if self.array.dataflow == "is":
            return _skewed(self.found.outputs[columns].T, ahead)
        held = self.found.outputs[rows, columns]
        turned = np.full((self.array.rows, held.shape[1]), NONE)
        turned[self.array.rows - len(held) :] = held[::-1]
        return _skewed(turned, start + self.spread[2] - 1)


def _skewed(values: Addresses, start: int) -> Stream:
    """Let lane i of (time, lanes[, values]) start i cycles after the first."""
    time, lanes = values.shape[:2]
    place = np.arange(time + lanes - 1)[:, None] - np.arange(lanes)
    inside = (place >= 0) & (place < time)
    lane = np.broadcast_to(np.arange(lanes), place.shape)
    asked = values[place[inside], lane[inside]]
    lines = np.nonzero(inside)[0] + start
    if asked.ndim > 1:
        lines, asked = lines.repeat(asked.shape[1]), asked.reshape(-1)
    held = asked != NONE
    return Stream(lines[held], asked[held])


def _loaded(values: Addresses, rows: int, start: int) -> Stream:
    """Load (rows, columns) from the top, the last row first, one row a cycle."""
    lines = np.repeat(start + rows - 1 - np.arange(len(values)), values.shape[1]).reshape(values.shape)[::-1]
    turned = values[::-1]
    held = turned != NONE
    return Stream(lines[held], turned[held])
