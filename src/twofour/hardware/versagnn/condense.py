"""condense: columns of a sparse strip that never meet in a row share one slot (the greedy merging of VersaGNN)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import HardwareError
from twofour.hardware.versagnn.sparse import Sparse, Whole

ORDERS = ("natural", "degree")
"""Rows as they are, or those with most values first, ties in their order."""


@dataclass(frozen=True, eq=False)
class Condensed:
    """A sparse matrix as the array takes it: strips of rows, each a list of slots, a slot one value a row at most.

    Attributes:
        matrix: The matrix, rows in the order of the strips.
        order: Row of the original matrix that stands at each place.
        height: Rows of a strip, the array's.
        slots: Slot of each value within its strip, int64.
        counts: Slots of each strip.
    """

    matrix: Sparse
    order: Whole
    height: int
    slots: Whole
    counts: Whole

    @property
    def total(self) -> int:
        """Slots of all strips."""
        return int(self.counts.sum())

    @property
    def fill(self) -> float:
        """Share of a slot's places that hold a value."""
        return len(self.slots) / (self.total * self.height)

    @cached_property
    def merged(self) -> Whole:
        """Columns of the matrix that share each slot, (slots,): so many rows of the right operand it needs at once."""
        strip = self.matrix.rows // self.height
        slot = np.concatenate([[0], self.counts.cumsum()])[strip] + self.slots
        place = np.unique(slot * self.matrix.shape[1] + self.matrix.columns)
        return np.bincount(place // self.matrix.shape[1], minlength=self.total)

    def table(self) -> tuple[NDArray[Any], Whole]:
        """Return values and columns by strip, row and slot, (strips, height, most slots); column -1: empty."""
        rows = self.matrix.rows
        shape = (len(self.counts), self.height, int(self.counts.max(initial=0)))
        values, columns = np.zeros(shape, self.matrix.values.dtype), np.full(shape, -1)
        at = (rows // self.height, rows % self.height, self.slots)
        values[at], columns[at] = self.matrix.values, self.matrix.columns
        return values, columns

    def unpack(self) -> Sparse:
        """Return the original matrix from the table alone."""
        values, columns = self.table()
        strip, row, slot = np.nonzero(columns >= 0)
        place = self.order[strip * self.height + row]
        return Sparse.of(self.matrix.shape, place, columns[strip, row, slot], values[strip, row, slot])


@lru_cache(maxsize=32)  # layers and phases share their graph
def condense(matrix: Sparse, height: int, *, order: str = "natural", ports: int | None = None) -> Condensed:
    """Put columns into slots: those with most values first, each into the first slot where no row is taken twice.

    No strip can have fewer slots than its fullest row has values, so that rows sorted by degree make the difference.

    Args:
        matrix: The sparse left operand.
        height: Rows of a strip.
        order: One of `ORDERS`.
        ports: Columns that may share a slot: each needs its own row of the right operand in one cycle. None: any.

    Raises:
        HardwareError: The order is unknown, or a number impossible.
    """
    if order not in ORDERS or height < 1 or (ports is not None and ports < 1):
        raise HardwareError(
            "the matrix cannot be condensed like this",
            got=f"height={height}, order={order!r}, ports={ports}",
            wanted=f"height and ports from 1, order one of {', '.join(ORDERS)}",
            remedy='condense(matrix, 32, order="degree")',
        )
    rows = np.arange(matrix.shape[0]) if order == "natural" else np.argsort(-matrix.degrees, kind="stable")
    sorted_ = matrix.take(rows)
    slots, counts = np.zeros(len(matrix.columns), np.int64), []
    for top in range(0, matrix.shape[0], height):
        begin, end = sorted_.starts[top], sorted_.starts[min(top + height, matrix.shape[0])]
        found, where = _first_fit(sorted_.rows[begin:end] - top, sorted_.columns[begin:end], ports)
        slots[begin:end] = where
        counts.append(found)
    return Condensed(sorted_, rows, height, slots, np.array(counts, np.int64))


def _first_fit(rows: Whole, columns: Whole, ports: int | None) -> tuple[int, Whole]:
    """Return how many slots a strip takes, and the slot of each value."""
    names, column = np.unique(columns, return_inverse=True)
    masks = [0] * len(names)
    for index, row in zip(column.tolist(), rows.tolist(), strict=True):
        masks[index] |= 1 << row
    taken: list[int] = []
    held: list[int] = []
    slot = np.zeros(len(names), np.int64)
    for index in sorted(range(len(names)), key=lambda i: -masks[i].bit_count()):
        mask = masks[index]
        place = next((i for i, used in enumerate(taken) if not used & mask and held[i] != ports), len(taken))
        if place == len(taken):
            taken.append(0)
            held.append(0)
        taken[place] |= mask
        held[place] += 1
        slot[index] = place
    return len(taken), slot[column]


@dataclass(frozen=True)
class Strips:
    """What each strip of a sparse matrix asks of the array, (strips,) each.

    Attributes:
        dense: Columns of the matrix.
        tiles: Columns of its square tiles that hold a value.
        occupied: Columns that hold a value.
        bound: Values of its fullest row: no strip has fewer slots.
    """

    dense: Whole
    tiles: Whole
    occupied: Whole
    bound: Whole


def strips(matrix: Sparse, height: int) -> Strips:
    """Count what modes without slots take of each strip of `height` rows."""
    count = -(-matrix.shape[0] // height)
    strip = matrix.rows // height
    width = -(-matrix.shape[1] // height)
    tile = np.unique(strip * width + matrix.columns // height)
    wide = np.minimum(height, matrix.shape[1] - tile % width * height)
    occupied = np.unique(strip * matrix.shape[1] + matrix.columns) // matrix.shape[1]
    padded = np.zeros(count * height, np.int64)
    padded[: matrix.shape[0]] = matrix.degrees
    return Strips(
        dense=np.full(count, matrix.shape[1]),
        tiles=np.bincount(tile // width, wide, count).astype(np.int64),
        occupied=np.bincount(occupied, minlength=count),
        bound=padded.reshape(count, height).max(1),
    )
