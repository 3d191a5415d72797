"""operands: addresses of the values that a layer reads and writes, as the matrices of its product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twofour.errors import HardwareError
from twofour.hardware.systolic.layer import Layer

Addresses = NDArray[np.int64]

LARGEST = 1 << 28
"""Places of one operand, 2 GiB of addresses."""

NONE = -1
"""Address of a place that holds no value: a window over the edge, a filter's zero."""


@dataclass(frozen=True)
class Operands:
    """Matrices of addresses, each operand's counted from 0; what N:M sparsity skips is gone from them.

    Attributes:
        inputs: (m, kept reduction): pixels of each window.
        weights: (kept reduction, n).
        outputs: (m, n).
        mask: Weights kept, (reduction, n), before zeros were left out.
        whole: Inputs of the whole reduction, where each filter skips other rows; else the same as `inputs`.
    """

    inputs: Addresses
    weights: Addresses
    outputs: Addresses
    mask: NDArray[np.bool_]
    whole: Addresses


def operands(layer: Layer, *, sparse: bool = False, block: int | None = None, seed: int = 0) -> Operands:
    """Lay a layer's product out as SCALE-Sim does.

    Args:
        layer: The layer.
        sparse: Whether its N:M counts: the first N of each M rows are kept, in all filters alike.
        block: Rows of a block where each filter keeps its own number of them, from 1 to half.
        seed: Of numpy's legacy generator, which draws those numbers.

    Raises:
        HardwareError: An operand has more than `LARGEST` places.
    """
    largest = max(layer.m * layer.k, layer.k * layer.n, layer.m * layer.n, layer.height * layer.width * layer.channels)
    if largest > LARGEST:
        raise too_large(f"the layer `{layer.name}`", f"{largest} places in one operand", "cut the layer into rows")
    inputs, weights = _windows(layer), np.arange(layer.n) * layer.k + np.arange(layer.k)[:, None]
    outputs = np.arange(layer.m)[:, None] * layer.n + np.arange(layer.n)
    place = np.arange(layer.k)[:, None]
    if not sparse:
        return Operands(inputs, weights, outputs, np.ones((layer.k, layer.n), bool), inputs)
    if block is None:
        row = place[:, 0] % layer.group < layer.kept
        mask = np.repeat(row[:, None], layer.n, 1)
        return Operands(inputs[:, row], weights[row], outputs, mask, inputs)
    drawn = np.random.RandomState(seed)
    kept = np.array([drawn.randint(1, block // 2 + 1) for _ in range(layer.n)])
    mask = place % block < kept
    half = block // 2
    blocks = -(-layer.k // (2 * block)) * 2
    padded = np.full((blocks * block, layer.n), NONE)
    padded[: layer.k] = np.where(mask, weights, NONE)
    return Operands(
        inputs, padded.reshape(blocks, block, -1)[:, :half].reshape(blocks * half, -1), outputs, mask, inputs
    )


def too_large(what: str, got: str, remedy: str) -> HardwareError:
    """Build the error for what has more addresses than are laid out."""
    return HardwareError(
        f"{what} is too large to lay its addresses out",
        got=got,
        wanted=f"at most {LARGEST}",
        remedy=f"systolic.cycles tells its cycles from the sizes alone; or {remedy}",
    )


def _windows(layer: Layer) -> Addresses:
    """Return the address of each value in each window, channels last; a window over the edge has none there."""
    row, column = np.divmod(np.arange(layer.m)[:, None], layer.out_width)
    down, rest = np.divmod(np.arange(layer.k)[None], layer.filter_width * layer.channels)
    across, channel = np.divmod(rest, layer.channels)
    y, x = row * layer.stride + down, column * layer.stride + across
    inside = (y < layer.height) & (x < layer.width)
    return np.where(inside, (y * layer.width + x) * layer.channels + channel, NONE)
