"""`twofour::recurrent`: the registered operator of a compiled recurrent layer, for torch.compile and torch.export."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.kernels.base import Kernel
from twofour.kernels.dispatch import DispatchTable, read_dispatch
from twofour.kernels.operator import inference_only
from twofour.kernels.recurrent.cpu import Direction, Factor, RecurrentProblem, recurrent
from twofour.kernels.recurrent.reference import CELLS
from twofour.kernels.registration import below_autograd, register

# numbers: inputs, hidden, width, layers, directions of a RecurrentProblem.
_SCHEMA = (
    "recurrent(Tensor x, SymInt batch, Tensor? sizes, Tensor? state, Tensor? memory, Tensor[] weights, "
    "Tensor[] biases, str[] dispatch, str cell, int[] numbers) -> (Tensor, Tensor, Tensor)"
)


def through_operator(
    problem: RecurrentProblem, directions: Sequence[Direction], x: Tensor, batch: int, *given: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Call `recurrent` as an operator that what follows the call sees; `given`: sizes, state, memory, or fewer."""
    sizes, state, memory = (*given, None, None, None)[:3]
    factors = _factors(directions)
    weights = [tensor for factor in factors for weight in factor.weights for tensor in weight.tensors]
    biases = [factor.bias for factor in factors if factor.bias is not None]
    texts = [factor.dispatch.to_text() for factor in factors]
    numbers = [problem.inputs, problem.hidden, problem.width, problem.layers, problem.directions]
    held = weights, biases, texts, problem.cell, numbers
    y, last, kept = torch.ops.twofour.recurrent(x, batch, sizes, state, memory, *held)
    return y, last, kept if problem.cell == "lstm" else None


def _factors(directions: Sequence[Direction]) -> list[Factor]:
    parts = [(one.input, one.recurrent, one.projection) for one in directions]
    return [factor for part in parts for factor in part if factor is not None]


class HeldLayers:
    """A stack of recurrent layers that the operands of the operator describe, from `weights` on.

    Reading them takes about as long as a small layer, so that a graph makes one of these and keeps it.

    Args:
        weights: Each weight in each layout of its dispatch table, one after the other.
        biases: float32 (out,), two for each layer and direction, or none.
        dispatch: A dispatch table for each weight.
        cell: A key of `CELLS`.
        numbers: Inputs, hidden, width, layers and directions of the problem.

    Raises:
        KernelError: They do not fit each other.
    """

    def __init__(
        self, weights: list[Tensor], biases: list[Tensor], dispatch: list[str], cell: str, numbers: list[int]
    ) -> None:
        self.held = weights, biases, dispatch, cell, numbers
        self.problem = _problem(cell, numbers)
        self.directions = _directions(self.problem, weights, biases, dispatch)

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldLayers:
        weights, biases, dispatch, cell, numbers = self.held  # weights are never written to: copies share them
        return HeldLayers(weights, copy.deepcopy(biases, memo), dispatch, cell, numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        return HeldLayers, self.held  # what directions look up is of this process

    def __call__(self, x: Tensor, batch: int, *given: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what `recurrent` answers; `given`: sizes, state and memory, or fewer."""
        laid_out = [None if tensor is None else tensor.contiguous() for tensor in given]
        return recurrent(self.problem, self.directions, x.contiguous(), batch, *laid_out)


def _recurrent(
    x: Tensor, batch: int, sizes: Tensor | None, state: Tensor | None, memory: Tensor | None, *held: Any
) -> tuple[Tensor, Tensor, Tensor]:
    y, last, kept = HeldLayers(*held)(x, batch, sizes, state, memory)
    return y, last, last.new_empty(0) if kept is None else kept


def _problem(cell: str, numbers: list[int]) -> RecurrentProblem:
    if cell not in CELLS or len(numbers) != 5 or min(numbers) < 1 or numbers[4] > 2:
        raise _unfit(f"cell {cell!r}, numbers {numbers}", f"one of {', '.join(CELLS)}, and five sizes")
    return RecurrentProblem(cell, *numbers)


def _directions(
    problem: RecurrentProblem, weights: list[Tensor], biases: list[Tensor], dispatch: list[str]
) -> list[Direction]:
    shapes, each = problem.shapes, 3 if problem.projected else 2
    ways = problem.layers * problem.directions
    if len(dispatch) != len(shapes) or len(biases) not in (0, 2 * ways):
        got = f"{len(dispatch)} dispatch tables, {len(biases)} biases"
        raise _unfit(got, f"{len(shapes)} tables, and no biases or {2 * ways}")
    left, left_biases = iter(weights), iter(biases)
    factors: list[Factor] = []
    for place, (text, shape) in enumerate(zip(dispatch, shapes, strict=True)):
        table = _table(text)
        held = list(islice(left, sum(1 + len(k.beside_bytes(*shape)) for k in table.by_layout.values())))
        bias = next(left_biases, None) if place % each < 2 else None
        factors.append(Factor(table, table.gather(held, shape), bias))
    if next(left, None) is not None:
        raise _unfit(f"{len(weights)} weights", "as many as the dispatch tables have layouts")
    return [Direction(*factors[begin : begin + each]) for begin in range(0, len(factors), each)]


def _table(text: str) -> DispatchTable:
    table = read_dispatch(text, Kernel)
    if outside := [kernel.name for kernel in table.kernels if kernel.native_product is None]:
        raise _unfit(f"kernel {outside[0]}", "products of ours, which a native call can run inside")
    return table


def _unfit(got: str, wanted: str) -> KernelError:
    return KernelError(
        "the operands of twofour::recurrent do not fit",
        got=got,
        wanted=wanted,
        remedy="pass what a layer of twofour.compile passes",
    )


def _no_gradient(x: Tensor, batch: int, sizes: Tensor | None, *arguments: Tensor | None) -> tuple[Tensor, ...]:
    inputs = (x, *arguments[:2])
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in inputs):
        raise inference_only()
    with below_autograd():
        return torch.ops.twofour.recurrent(x, batch, sizes, *arguments)


def _fake(x: Tensor, batch: int, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    cell, numbers = given[-2:]
    problem = _problem(cell, numbers)
    ways = problem.layers * problem.directions
    kept = (ways, batch, problem.hidden) if problem.cell == "lstm" else (0,)
    y = x.new_empty(*x.shape[:-1], problem.directions * problem.width)
    return y, x.new_empty(ways, batch, problem.width), x.new_empty(*kept)


register(_SCHEMA, _fake, CompositeExplicitAutograd=_recurrent, Autograd=_no_gradient)
