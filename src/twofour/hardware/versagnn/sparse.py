"""Sparse: a matrix by rows, without its zeros; a graph's neighbours or a bag of words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import HardwareError

Whole = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Sparse:
    """A matrix in compressed sparse rows; nothing may change it afterwards.

    Attributes:
        shape: Rows and columns.
        starts: Where each row's values start, and their number at the end, int64 (rows + 1,).
        columns: Column of each value, ascending within a row, int64.
        values: The values.
    """

    shape: tuple[int, int]
    starts: Whole
    columns: Whole
    values: NDArray[Any]

    def __post_init__(self) -> None:
        rows, columns = self.shape
        counts = np.diff(self.starts)
        within = len(self.columns) == 0 or (self.columns.min() >= 0 and self.columns.max() < columns)
        if len(self.starts) != rows + 1 or self.starts[0] != 0 or (counts < 0).any() or not within:
            raise _malformed("rows that do not follow each other, or columns outside")
        if not len(self.values) == len(self.columns) == self.starts[-1]:
            raise _malformed(f"{len(self.values)} values, {len(self.columns)} columns, rows of {self.starts[-1]}")

    @classmethod
    def of(cls, shape: tuple[int, int], rows: Whole, columns: Whole, values: NDArray[Any] | float = 1.0) -> Sparse:
        """Gather values at (row, column); of two at one place the first stays.

        Raises:
            HardwareError: A place is outside of the shape, or rows, columns and values are not as many.
        """
        rows, columns, given = np.asarray(rows), np.asarray(columns), np.asarray(values, np.float64)
        if rows.ndim != 1 or columns.shape != rows.shape or given.shape not in ((), rows.shape):
            raise _malformed(f"rows {rows.shape}, columns {columns.shape}, values {given.shape}")
        for name, places, size in (("row", rows, shape[0]), ("column", columns, shape[1])):
            if len(places) and (places.dtype.kind not in "iu" or places.min() < 0 or places.max() >= size):
                raise _malformed(f"{name} {places.min()} to {places.max()} of {size}")
        place, first = np.unique(rows.astype(np.int64) * shape[1] + columns.astype(np.int64), return_index=True)
        kept = np.broadcast_to(given, rows.shape)[first]
        starts = np.searchsorted(place // shape[1], np.arange(shape[0] + 1))
        return cls(shape, starts, place % shape[1], kept)

    @property
    def rows(self) -> Whole:
        """Row of each value."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.starts))

    @property
    def degrees(self) -> Whole:
        """Values in each row."""
        return np.diff(self.starts)

    def dense(self) -> NDArray[Any]:
        """Return the matrix with its zeros."""
        whole = np.zeros(self.shape, self.values.dtype)
        whole[self.rows, self.columns] = self.values
        return whole

    def take(self, order: Whole) -> Sparse:
        """Return the rows in another order: row i of the result is row order[i]."""
        counts = self.degrees[order]
        starts = np.concatenate([[0], counts.cumsum()])
        inside = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        at = np.repeat(self.starts[order], counts) + inside
        return Sparse((len(order), self.shape[1]), starts, self.columns[at], self.values[at])

    def __matmul__(self, right: NDArray[Any]) -> NDArray[Any]:
        """Multiply with a dense matrix, the reference of every mode."""
        out = np.zeros((self.shape[0], right.shape[1]), np.result_type(self.values, right))
        np.add.at(out, self.rows, self.values[:, None] * right[self.columns])
        return out


def _malformed(got: str) -> HardwareError:
    return HardwareError(
        "the sparse matrix is malformed",
        got=got,
        wanted="rows, columns and values of a matrix within its shape",
        remedy="Sparse.of(shape, rows, columns, values)",
    )
