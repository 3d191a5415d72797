"""Engine: blocked systolic arrays that serve both phases of a graph network, dense with Strassen and sparse with slots.

The abstract of VersaGNN (Shi, Jin, Zhu 2021, arXiv 2105.01280) gives the two ideas: blocked arrays that run Strassen's
algorithm, and a greedy merging of sparse sub-matrices into condensed ones. Everything else here, sizes, formats,
overlaps and costs among it, is our design.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twofour.errors import HardwareError, one_of
from twofour.hardware.systolic.array import SystolicArray, cycles, folds
from twofour.hardware.versagnn.condense import Condensed, condense, strips
from twofour.hardware.versagnn.sparse import Sparse, Whole
from twofour.hardware.versagnn.strassen import PRODUCTS, counts, padded
from twofour.hardware.versagnn.work import Work

MODES = ("plain", "tiles", "columns", "condensed", "sorted")
"""How a sparse operand enters: whole, non-empty square tiles, non-empty columns, condensed slots, the same with rows
sorted by degree."""

COLUMN_WORDS, BITMAP = 0.5, 32
"""Words of a kept value's column (16 bits), and places of a slot whose occupancy fits one word."""


@dataclass(frozen=True)
class Engine:
    """Several arrays that work side by side on folds or strips of one product.

    Attributes:
        array: One of the arrays; outputs stay in the units.
        arrays: How many: seven, so that each takes one of Strassen's products.
        ports: Rows of the right operand that one slot can fetch in a cycle; None: as many as columns share a slot.
    """

    array: SystolicArray = SystolicArray(32, 32)  # noqa: RUF009 - frozen
    arrays: int = PRODUCTS
    ports: int | None = None

    def __post_init__(self) -> None:
        if self.array.dataflow != "os" or self.arrays < 1:
            raise HardwareError(
                "the engine cannot exist",
                got=f"{self.arrays} arrays, dataflow {self.array.dataflow}",
                wanted="arrays from 1, outputs staying in the units",
                remedy="Engine(SystolicArray(32, 32), arrays=7)",
            )

    @property
    def units(self) -> int:
        """Multiply-accumulate units of all arrays."""
        return self.arrays * self.array.units

    def utilisation(self, work: Work) -> float:
        """Return useful multiply-adds over units times cycles; Strassen needs fewer of them and may exceed 1."""
        return work.useful / (self.units * work.cycles)

    def transform(self, m: int, n: int, k: int, levels: int = 0) -> Work:
        """Price a dense product with Strassen's levels; 0 is the plain one.

        The leaves' folds are spread over the arrays. An adder at each lane of an array's two inputs and its output
        makes sums of blocks while earlier folds run: additions cost time only where they take longer than the products.
        """
        size = padded(m, n, k, levels)
        leaf = tuple(length >> levels for length in size)
        leaves = PRODUCTS**levels
        down, across, _ = folds(self.array, *leaf)
        one = cycles(self.array, *leaf) // (down * across)
        found = counts(m, n, k, levels)
        adders = self.arrays * (self.array.rows + 2 * self.array.columns)
        streamed = leaves * (across * leaf[0] * leaf[2] + down * leaf[1] * leaf[2] + leaf[0] * leaf[1])
        return Work(
            cycles=max(-(-leaves * down * across // self.arrays) * one, -(-found.additions // adders)),
            products=found.multiplications,
            useful=m * n * k,
            additions=found.additions,
            beside=streamed + 3 * found.additions,  # a sum reads two words and writes one
            main=m * k + k * n + m * n,
        )

    def aggregate(self, matrix: Sparse, width: int, mode: str = "sorted") -> Work:
        """Price a sparse matrix times a dense one of `width` columns, in one of `MODES`.

        A strip of rows streams its columns or slots once for each fold of the dense operand's columns, back to back,
        and is filled and drained once. Strips go to the array that is free first, the longest first.

        Raises:
            HardwareError: The mode is unknown.
        """
        one_of(f"the mode {mode!r} is unknown", mode, MODES, HardwareError, 'mode="sorted"')
        return self._price(matrix, width, mode, *self._issued(matrix, mode))

    def _issued(self, matrix: Sparse, mode: str) -> tuple[Whole, int, float]:
        """Columns or slots that each strip issues, rows of the right operand fetched, words of the left one."""
        height, held = self.array.rows, len(matrix.columns)
        if mode in ("condensed", "sorted"):
            packed = self.condense(matrix, mode)
            kept = held * (1 + COLUMN_WORDS) + packed.total * height / BITMAP
            return packed.counts, int(packed.merged.sum()), kept
        found = strips(matrix, height)
        if mode == "plain":
            return found.dense, int(found.dense.sum()), float(matrix.shape[0] * matrix.shape[1])
        if mode == "tiles":
            issued = int(found.tiles.sum())
            return found.tiles, issued, float(issued * height)
        issued = int(found.occupied.sum())
        return found.occupied, issued, issued * (height + COLUMN_WORDS)

    def condense(self, matrix: Sparse, mode: str = "sorted") -> Condensed:
        """Condense a matrix for this engine's arrays; of "columns", each has a slot of its own."""
        ports = 1 if mode == "columns" else self.ports
        return condense(matrix, self.array.rows, order="degree" if mode == "sorted" else "natural", ports=ports)

    def _price(self, matrix: Sparse, width: int, mode: str, issued: Whole, fetched: int, left: float) -> Work:
        across = -(-width // self.array.columns)
        fill = self.array.rows + self.array.columns - 2
        held = len(matrix.columns)
        done = held if mode in ("condensed", "sorted") else int(issued.sum()) * self.array.rows
        outputs = matrix.shape[0] * width
        return Work(
            cycles=spread(issued * across + fill, self.arrays),
            products=done * width,
            useful=held * width,
            beside=left * across + fetched * width + outputs,
            main=left + matrix.shape[1] * width + outputs,
        )


def spread(lengths: Whole, arrays: int) -> int:
    """Return when the last of some arrays is done, each job given to the one that is free first, longest first."""
    busy = np.zeros(arrays, np.int64)
    for length in np.sort(lengths)[::-1]:
        busy[busy.argmin()] += length
    return int(busy.max())
