"""step_slots: a condensed matrix times a dense one, cycle by cycle; units fetch by the column a value carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import HardwareError
from twofour.hardware.systolic.array import SystolicArray
from twofour.hardware.versagnn.condense import Condensed


@dataclass(frozen=True)
class SteppedSlots:
    """What the array computed.

    Attributes:
        output: The product, rows in the order of the original matrix.
        cycles: Cycles of each strip, (strips,).
    """

    output: NDArray[Any]
    cycles: NDArray[np.int64]


def step_slots(array: SystolicArray, packed: Condensed, right: NDArray[Any]) -> SteppedSlots:
    """Multiply on the array, one cycle at a time, all strips beside each other.

    A slot enters each row one cycle after the row above, as a value with its column, and moves right by one unit a
    cycle. The unit in column j multiplies it with the entry of its column in the right operand's column j and adds it
    to the output that it holds for the fold of columns the slot belongs to. Folds follow each other without a gap.

    Args:
        array: The array, outputs staying in the units; its rows are the strips' height.
        packed: The condensed left operand.
        right: Dense right operand, (columns of the left one, width).

    Raises:
        HardwareError: The operands or the array do not fit.
    """
    _require(array, packed, right)
    columns, width = right.shape
    across = -(-width // array.columns)
    padded = np.zeros((columns + 1, across * array.columns), np.result_type(packed.matrix.values, right))
    padded[:columns, :width] = right  # the last row is what an empty place, column -1, fetches
    values, tags = packed.table()
    output = np.zeros((*values.shape[:2], padded.shape[1]), padded.dtype)
    most = values.shape[2]
    if most:
        for cycle in range(most * across + array.rows + array.columns - 2):
            _step(array, (values, tags, packed.counts), padded, output, cycle)
    whole = np.zeros((packed.matrix.shape[0], width), padded.dtype)
    whole[packed.order] = output.reshape(-1, padded.shape[1])[: len(whole), :width]
    return SteppedSlots(whole, packed.counts * across + array.rows + array.columns - 2)


def _require(array: SystolicArray, packed: Condensed, right: NDArray[Any]) -> None:
    if array.dataflow != "os" or array.rows != packed.height:
        raise HardwareError(
            "the condensed matrix is not cut for this array",
            got=f"strips of {packed.height} rows, {array}",
            wanted="strips as high as the array has rows, outputs staying in the units",
            remedy="condense(matrix, array.rows)",
        )
    columns = packed.matrix.shape[1]
    if np.ndim(right) != 2 or right.shape[0] != columns or right.shape[1] < 1:
        raise HardwareError(
            "the condensed product does not fit",
            got=f"a left operand {packed.matrix.shape}, a right one {np.shape(right)}",
            wanted=f"a right operand ({columns}, 1 or more)",
            remedy="give the right operand a row for each column of the left one",
        )


def _step(
    array: SystolicArray,
    slots: tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]],
    right: NDArray[Any],
    output: NDArray[Any],
    cycle: int,
) -> None:
    """Let every unit that a slot has reached multiply and add."""
    values, tags, counts = slots
    passed = cycle - np.arange(array.rows)[:, None] - np.arange(array.columns)  # slots that a unit has seen before
    fold, slot = np.divmod(passed, np.maximum(counts, 1)[:, None, None])
    here = (fold >= 0) & (fold < right.shape[1] // array.columns) & (counts > 0)[:, None, None]
    strip, row, column = np.nonzero(here)
    fold, slot = fold[here], slot[here]
    place = fold * array.columns + column
    output[strip, row, place] += values[strip, row, slot] * right[tags[strip, row, slot], place]
