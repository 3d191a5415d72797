"""Work: what a product is cut into, for every tile a library could choose; nothing fitted enters here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twofour.hardware.machine import BITS, Machine, stored_bytes

Array = NDArray[np.float64]

TILES = (
    (64, 64),
    (64, 128),
    (128, 64),
    (64, 256),
    (256, 64),
    (128, 128),
    (128, 192),
    (128, 256),
    (256, 128),
    (256, 256),
)
"""(tokens, outputs) of the tile of one multiprocessor, those that cuBLASLt and CUTLASS ship."""

SPLITS = (1, 2, 4, 8, 16)
"""In how many parts the reduction may be cut."""

SWEPT = 256
"""Most bytes along a side of a tile of the 2:4 kernels that sweep the weight; see `cut`."""

STEP = 64
"""Elements of the reduction that a tile takes at once."""


@dataclass(frozen=True)
class Work:
    """Products, one a row, cut in every way, one a column; see `cut`.

    Attributes:
        flops: Operations, a multiply-add as two, counted as if dense; (rows, 1).
        tiles: Tiles in all, parts of the reduction counted.
        depth: Elements of the reduction in one tile.
        area: Tokens times outputs of one tile.
        loads: Bytes that one tile loads.
        operands: Bytes of both operands in memory, selectors with them; (rows, 1).
        weights: Those of the operand of n; (rows, 1).
        output: Bytes written; (rows, 1).
        again: Bytes of operands that are read more than once where a wave of tiles finds nothing of the one before.
        reach: Bytes that the cache has to hold so that it does.
        parts: Parts of the reduction; (1, columns).
        offered: Whether the library has such a tile; (1, columns).
    """

    flops: Array
    tiles: Array
    depth: Array
    area: Array
    loads: Array
    operands: Array
    weights: Array
    output: Array
    again: Array
    reach: Array
    parts: Array
    offered: NDArray[np.bool_]


@cache
def _cuts() -> tuple[Array, Array, Array]:
    rows = np.array([(m, n, parts) for m, n in TILES for parts in SPLITS], dtype=np.float64)
    return rows[None, :, 0], rows[None, :, 1], rows[None, :, 2]


def _columns(*sizes: ArrayLike) -> tuple[Array, ...]:
    columns: Any = [np.atleast_1d(np.asarray(size, dtype=np.float64))[:, None] for size in sizes]
    return np.broadcast_arrays(*columns)


def cut(
    machine: Machine,
    dtype: str,
    sparse: bool,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    batch: ArrayLike,
    weight: float | None = None,
    *,
    repeats: tuple[ArrayLike, ArrayLike] = (1, 1),
) -> Work:
    """Cut products of (m, k) by (k, n), `batch` of them each, into tiles.

    `repeats` says how often a value of the operand of m, and of n, stands in its matrix while memory holds it once: the
    taps of a convolution, multiplied as an implicit product. A tile loads every repetition, memory does not.

    A sparse weight, the operand with n, is read as half its values and their selectors; `weight` says in its place how
    many bytes a value has that is unpacked where it is multiplied. The output has 2 bytes a value,
    float32 and tf32 4. The units of a machine work side by side on tiles that form nearly a square, so that a wave of
    them shares rows and columns. Only 2:4 products of 16 bits and more without a copy engine have no tile above 128 by
    128, and sweep the whole weight for each row of tiles (read off GB10, whose cache is small: 2048 x 16384 x 2048
    takes as long as 16 readings of the weight). Data-centre Blackwell multiplies by pairs of units that share the
    tokens of a tile.
    """
    m_, n_, k_, batch_, often, often_n = _columns(m, n, k, batch, *repeats)
    tile_m, tile_n, parts = _cuts()
    value, weight = BITS[dtype] / 8, stored_bytes(dtype, sparse=sparse) if weight is None else weight
    plane = np.ceil(m_ / tile_m) * np.ceil(n_ / tile_n) * batch_
    depth = np.ceil(k_ / parts / STEP) * STEP
    area = tile_m * tile_n
    together = np.minimum(plane, machine.units) * area
    swept = sparse and not machine.copy_engine and value >= 2
    high = np.minimum(m_, tile_m if swept else np.maximum(tile_m, np.sqrt(together)))
    wide = np.minimum(n_, together / high)
    waves = np.maximum(1, m_ * n_ * batch_ / together)
    once, once_n = value / often, weight / often_n  # bytes in memory
    operands = (m_ * once + n_ * once_n) * k_ * batch_
    again = np.maximum(0, waves * (high * once + wide * once_n) * k_ - operands)
    return Work(
        flops=2 * m_ * n_ * k_ * batch_,
        tiles=plane * parts,
        depth=depth,
        area=np.broadcast_to(area, plane.shape),
        loads=depth * (tile_m * value / (2 if machine.family == "blackwell" else 1) + tile_n * weight),
        operands=operands,
        weights=n_ * once_n * k_ * batch_,
        output=m_ * n_ * batch_ * max(2.0, 4 * (value == 4)),
        again=again,
        reach=n_ * once_n * k_ * batch_ + high * once * k_ if swept else np.broadcast_to(operands, plane.shape),
        parts=parts,
        offered=np.maximum(tile_m, tile_n) * value <= SWEPT if swept else tile_m > 0,
    )
