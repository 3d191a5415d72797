"""Recurrent layers on the CPU: rows of recurrent.inc for the gates, any native product for the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.dispatch import DispatchTable
from twofour.kernels.recurrent.reference import CELLS


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

    def at(self, rows: int) -> tuple[int, Tensor]:
        """Return the place of the product that serves so many rows, and its weight."""
        kernel, layout = self.dispatch.at(rows)
        assert isinstance(kernel, Kernel) and kernel.native_product is not None, kernel
        return kernel.native_product, self.weights[layout].tensor


@dataclass(frozen=True)
class Direction:
    """The weights of one direction of a layer."""

    input: Factor
    recurrent: Factor
    projection: Factor | None = None


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
        x: float32 (tokens, in): the rows of a step together, one step after the other.
        batch: Sequences.
        sizes: int64 (steps,) on the CPU, sequences of each step, the longest first; None: `batch` in each.
        state: float32 (layers * directions, batch, width), before the first step; None: zeros.
        memory: float32 (layers * directions, batch, hidden), of an LSTM; None: zeros.

    Returns:
        The last layer's states (tokens, directions * width), the last states in the shape of `state`, and of an LSTM
        the last memories.

    Raises:
        KernelError: The operands do not fit.
    """
    lstm, count = problem.cell == "lstm", problem.directions
    last = torch.empty(len(directions), batch, problem.width, dtype=torch.float32, device="cpu")
    kept = torch.empty(len(directions), batch, problem.hidden, dtype=torch.float32, device="cpu") if lstm else None
    gates, code = native.best("recurrent", dtype="float32").index, list(CELLS).index(problem.cell)
    run, threads = native.extension().recurrent, native.threads()
    for layer in range(problem.layers):
        y = torch.empty(x.shape[0], count * problem.width, dtype=torch.float32, device="cpu")
        for way in range(count):
            index = layer * count + way
            one = directions[index]
            (first, w_x), (second, w_h) = one.input.at(x.shape[0]), one.recurrent.at(batch)
            third, w_p = (-1, None) if one.projection is None else one.projection.at(batch)
            run(
                *(gates, code, first, second, third, x, sizes),
                *(w_x, one.input.bias, w_h, one.recurrent.bias, w_p),
                *(None if state is None else state[index], None if memory is None else memory[index]),
                y if count == 1 else y[:, way * problem.width : (way + 1) * problem.width],
                *(last[index], None if kept is None else kept[index]),
                *(way == 1, threads),
            )
        x = y
    return x, last, kept
