"""strassen: products of blocks by seven multiplications in the place of eight, level upon level (Strassen 1969)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import HardwareError

Matrix = NDArray[Any]

BEFORE, AFTER = 10, 8
"""Additions of blocks before the seven products and after them."""
PRODUCTS = 7


@dataclass(frozen=True)
class Counts:
    """Scalar operations of a product: those of the leaves' products, and the additions of blocks around them."""

    multiplications: int
    additions: int


def counts(m: int, n: int, k: int, levels: int) -> Counts:
    """Return the operations of (m, k) by (k, n); a size that does not divide is filled up with zeros.

    Each level takes 7/8 of the multiplications. Of the ten additions before, five are of blocks of each operand.

    Raises:
        HardwareError: The number of levels is negative.
    """
    m, n, k = padded(m, n, k, levels)
    if levels == 0:
        return Counts(m * n * k, 0)
    half = (m // 2, n // 2, k // 2)
    inner = counts(*half, levels - 1)
    blocks = BEFORE // 2 * (half[0] * half[2] + half[2] * half[1]) + AFTER * half[0] * half[1]
    return Counts(PRODUCTS * inner.multiplications, PRODUCTS * inner.additions + blocks)


def padded(m: int, n: int, k: int, levels: int) -> tuple[int, int, int]:
    """Return the sizes that divide by two at every level.

    Raises:
        HardwareError: The number of levels is negative.
    """
    if levels < 0:
        raise HardwareError(
            "Strassen's levels cannot be negative",
            got=f"levels={levels}",
            wanted="0 or more",
            remedy="levels=0 multiplies without Strassen",
        )
    step = 2**levels
    return -(-m // step) * step, -(-n // step) * step, -(-k // step) * step


def strassen(x: Matrix, w: Matrix, levels: int, multiply: Callable[[Matrix, Matrix], Matrix]) -> Matrix:
    """Multiply (m, k) by (k, n), the leaves' products with `multiply`.

    Whole numbers are exact, with one bit more for each operand and level.

    Args:
        x: Left operand.
        w: Right operand.
        levels: How often both are halved.
        multiply: What computes a leaf, such as a step of an array.
    """
    m, n, k = padded(x.shape[0], w.shape[1], x.shape[1], levels)
    left, right = np.zeros((m, k), x.dtype), np.zeros((k, n), w.dtype)
    left[: x.shape[0], : x.shape[1]], right[: w.shape[0], : w.shape[1]] = x, w
    return _product(left, right, levels, multiply)[: x.shape[0], : w.shape[1]]


def _product(x: Matrix, w: Matrix, levels: int, multiply: Callable[[Matrix, Matrix], Matrix]) -> Matrix:
    if levels == 0:
        return multiply(x, w)
    (a, b), (c, d) = ([np.ascontiguousarray(part) for part in np.hsplit(row, 2)] for row in np.vsplit(x, 2))
    (e, f), (g, h) = ([np.ascontiguousarray(part) for part in np.hsplit(row, 2)] for row in np.vsplit(w, 2))
    pairs = ((a + d, e + h), (c + d, e), (a, f - h), (d, g - e), (a + b, h), (c - a, e + f), (b - d, g + h))
    m1, m2, m3, m4, m5, m6, m7 = (_product(*pair, levels - 1, multiply) for pair in pairs)
    return np.block([[m1 + m4 - m5 + m7, m3 + m5], [m2 + m4, m1 - m2 + m3 + m6]])
