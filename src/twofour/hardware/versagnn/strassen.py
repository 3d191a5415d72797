"""strassen: products of blocks by seven multiplications in the place of eight, level upon level (Strassen 1969)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import HardwareError
from twofour.hardware.sizes import require_integers

Matrix = NDArray[Any]

BEFORE, AFTER = 10, 8
"""Additions of blocks before the seven products and after them."""
PRODUCTS = 7

MOST_LEVELS = 3
"""Levels that a product of any size may have, eight blocks along each axis."""


@dataclass(frozen=True)
class Counts:
    """Scalar operations of a product: those of the leaves' products, and the additions of blocks around them."""

    multiplications: int
    additions: int


def counts(m: int, n: int, k: int, levels: int) -> Counts:
    """Return the operations of (m, k) by (k, n); a size that does not divide is filled up with zeros.

    Each level takes 7/8 of the multiplications. Of the ten additions before, five are of blocks of each operand.

    Raises:
        HardwareError: As `padded`.
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
        HardwareError: A size is impossible, or the levels are negative or more than `MOST_LEVELS` and than it takes to
            halve the smallest size to one: zeros would fill all beyond.
    """
    m, n, k = require_integers("a product cannot have this size", "m rows, n columns, k reduction", m=m, n=n, k=k)
    most = max(MOST_LEVELS, (min(m, n, k) - 1).bit_length())
    if not isinstance(levels, (int, np.integer)) or isinstance(levels, bool) or not 0 <= levels <= most:
        raise HardwareError(
            f"Strassen cannot halve {m} x {n} x {k} so often",
            got=f"levels={levels}",
            wanted=f"a whole number from 0 to {most}",
            remedy="levels=0 multiplies without Strassen; halves smaller than an array only add zeros",
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

    Raises:
        HardwareError: As `padded`.
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
