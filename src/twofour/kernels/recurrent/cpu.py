"""Recurrent layers on the CPU: rows of recurrent.inc for the gates, any native product for the weights."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from twofour import native
from twofour.kernels.base import Kernel, Prepared, Row
from twofour.kernels.dispatch import DispatchTable
from twofour.kernels.recurrent.reference import CELLS

MOST_CALLS = 64
"""Counts of rows that a direction keeps the operands of."""

_CODES = {cell: code for code, cell in enumerate(CELLS)}
"""Cell -> what native calls take for it."""


@dataclass(frozen=True)
class RecurrentProblem:
    """A stack of recurrent layers.

    Attributes:
        cell: A key of `CELLS`.
        inputs: Inputs of the first layer.
        hidden: Units of a direction.
        width: Numbers in a state of it: `hidden`, or fewer of a projected LSTM.
        layers: Layers above each other.
        directions: 1, or 2 where a second pass goes from the last step to the first.
    """

    cell: str
    inputs: int
    hidden: int
    width: int
    layers: int = 1
    directions: int = 1

    @property
    def projected(self) -> bool:
        """Whether a state is a product of what the gates answer."""
        return self.width != self.hidden

    def input_rows(self, tokens: int, batch: int) -> int:
        """Return how many rows of `tokens` meet the weight of the inputs at once: Sequence::chunk of sequence.h."""
        if tokens <= batch:
            return tokens
        return min(tokens, max(batch, native.extension().recurrent_numbers // (CELLS[self.cell] * self.hidden)))

    @property
    def roles(self) -> list[str]:
        """What each of `shapes` multiplies: "input", "state" or, of a projection, "hidden"."""
        each = ["input", "state", *(["hidden"] if self.projected else [])]
        return each * (self.layers * self.directions)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shape (out, in) of each weight: of the inputs, of the states, and of a projection, of each direction."""
        rows, found = CELLS[self.cell] * self.hidden, list[tuple[int, int]]()
        for layer in range(self.layers):
            inputs = self.inputs if layer == 0 else self.directions * self.width
            one = [(rows, inputs), (rows, self.width), *([(self.width, self.hidden)] if self.projected else [])]
            found += one * self.directions
        return found


@dataclass(frozen=True)
class Factor:
    """A weight inside a recurrent layer, with the native products that serve it.

    Attributes:
        dispatch: Products by rows that are multiplied at once; each has a place in `native.products`.
        weights: The weight in each of `dispatch.layouts`.
        bias: float32 (out,) or None.
    """

    dispatch: DispatchTable
    weights: tuple[Prepared, ...]
    bias: Tensor | None = None

    @cached_property
    def steps(self) -> tuple[tuple[int, Tensor], ...]:
        """The place of each step's product, and its weight; looked up once: a call of one step takes microseconds."""
        return tuple((_place(kernel), self.weights[layout].tensor) for kernel, layout in self.dispatch.steps)

    def at(self, rows: int) -> tuple[int, Tensor]:
        """Return the place of the product that serves so many rows, and its weight."""
        limits = self.dispatch.limits
        return self.steps[bisect_left(limits, rows) if limits else 0]


def _place(kernel: Row) -> int:
    assert isinstance(kernel, Kernel) and kernel.native_product is not None, kernel
    return kernel.native_product


@dataclass(frozen=True)
class Direction:
    """The weights of one direction of a layer."""

    input: Factor
    recurrent: Factor
    projection: Factor | None = None

    @cached_property
    def _calls(self) -> dict[tuple[int, int], tuple[Any, ...]]:
        return {}

    def at(self, rows: int, batch: int) -> tuple[Any, ...]:
        """Return what every call on so many rows of inputs and of states is handed, looked up once.

        The row of the gates, the places of the three products, and the weights with their biases.
        """
        found = self._calls.get((rows, batch))
        if found is None:
            (first, w_x), (second, w_h) = self.input.at(rows), self.recurrent.at(batch)
            third, w_p = (-1, None) if self.projection is None else self.projection.at(batch)
            gates = native.best("recurrent", dtype="float32").index
            found = gates, first, second, third, w_x, self.input.bias, w_h, self.recurrent.bias, w_p
            if len(self._calls) >= MOST_CALLS:
                self._calls.clear()
            self._calls[rows, batch] = found
        return found


def recurrent(
    problem: RecurrentProblem,
    directions: Sequence[Direction],
    x: Tensor,
    batch: int,
    sizes: Tensor | None = None,
    state: Tensor | None = None,
    memory: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run a stack of recurrent layers over whole sequences, or over one step of each.

    Args:
        problem: What is computed.
        directions: One per layer and direction, in torch's order.
        x: float32 (tokens, in) or (steps, batch, in): the rows of a step together, one step after the other.
        batch: Sequences.
        sizes: int64 (steps,) on the CPU, sequences of each step, the longest first; None: `batch` in each.
        state: float32 (layers * directions, batch, width), before the first step; None: zeros.
        memory: float32 (layers * directions, batch, hidden), of an LSTM; None: zeros.

    Returns:
        The last layer's states (..., directions * width) in the axes of `x`, the last states in the shape of `state`,
        and of an LSTM the last memories.

    Raises:
        KernelError: The operands do not fit.
    """
    count, ways, width, steps = problem.directions, len(directions), problem.width, x.shape[0]
    sizes_of_y = (steps, count * width) if x.ndim == 2 else (steps, batch, count * width)
    tokens = steps if x.ndim == 2 else steps * batch
    rows = tokens if tokens == batch else problem.input_rows(tokens, batch)
    last = x.new_empty(ways, batch, width)  # of separate sizes: of one tuple it takes half a microsecond longer
    kept = x.new_empty(ways, batch, problem.hidden) if problem.cell == "lstm" else None
    code, run, threads, y = _CODES[problem.cell], native.extension().recurrent, native.threads(), x
    for place, one in enumerate(directions):
        if place % count == 0:
            x, y = y, x.new_empty(*sizes_of_y)
        gates, k_x, k_h, k_p, w_x, b_x, w_h, b_h, w_p = one.at(rows, batch)
        run(gates, code, k_x, k_h, k_p, x, sizes, w_x, b_x, w_h, b_h, w_p, state, memory, y, last, kept, place, threads)
    return y, last, kept
