"""step: a product on a systolic array cycle by cycle; each unit multiplies what stands in its registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import HardwareError
from twofour.hardware.systolic.array import SystolicArray
from twofour.hardware.systolic.weights import Kept

Array = NDArray[Any]

CHUNK = 1 << 16
"""Units stepped at once: folds do not depend on each other, and sums and products stay in a second-level cache."""


@dataclass(frozen=True)
class Stepped:
    """What the array computed.

    Attributes:
        output: x @ w, (m, n).
        cycles: Cycles counted while stepping, folds one after the other.
    """

    output: Array
    cycles: int


def step(array: SystolicArray, x: Array, w: Array | Kept) -> Stepped:
    """Multiply x by w on the array, one cycle at a time.

    Operands enter at the left and upper edges, each row or column one cycle after its neighbour, and move on by one
    unit a cycle; a register that is j units from the edge therefore shows what entered j cycles ago, which is how the
    registers of all folds are read at once here. A sparse weight's units also hold or pass the row that each kept value
    came from and pick that value of x: a wrong row gives a wrong product.

    Args:
        array: The array.
        x: (m, k), real or whole numbers.
        w: (k, n), or kept values with their rows.

    Raises:
        HardwareError: The operands do not fit each other.
    """
    reduction, n = (w.reduction, w.values.shape[1]) if isinstance(w, Kept) else w.shape
    if x.ndim != 2 or x.shape[1] != reduction or 0 in (*x.shape, reduction, n):
        raise HardwareError(
            "the operands do not fit each other",
            got=f"x {tuple(x.shape)} and w ({reduction}, {n})",
            wanted="x (m, k) and w (k, n), none of them empty",
            remedy="pass the weight as (in, out)",
        )
    values = w.values if isinstance(w, Kept) else w
    kind = np.result_type(x, values)
    x, values = x.astype(kind, copy=False), values.astype(kind, copy=False)
    rows = w.rows if isinstance(w, Kept) else None
    if array.dataflow == "os":
        return _outputs_held(array, x, values, rows)
    if array.dataflow == "ws":
        return _weights_held(array, x, values, rows)
    return _inputs_held(array, x, values, rows)


def _outputs_held(array: SystolicArray, x: Array, values: Array, rows: NDArray[np.int64] | None) -> Stepped:
    """Step "os": rows of x enter at the left, columns of w at the top; a unit adds to the output that it holds."""
    (m, _), (time, n) = x.shape, values.shape
    left = _blocks(x, array.rows)
    top = _from_above(values, array)
    if rows is None:
        right = _delayed(left, array.columns - 1)
    else:
        picked = _Picked(x.T, rows, len(left) * array.rows)
        tags = _from_above(picked.starts, array)
        lanes = np.arange(len(left) * array.rows).reshape(-1, 1, array.rows, 1)
    output = np.zeros((len(left), len(top), array.rows, array.columns), x.dtype)
    last = time + array.rows + array.columns - 3
    for down, across in _chunks(array, len(left), len(top)):
        sums = output[down, across]
        product = np.empty(sums.shape, x.dtype)
        for cycle in range(last + 1):
            above = slice(cycle, cycle + array.rows)
            if rows is None:
                taken = right[down, None, :, cycle : cycle + array.columns]
            else:
                taken = picked.take(lanes[down] + tags[across, above][None, :, ::-1], product)
            np.multiply(taken, top[across, above][None, :, ::-1], out=product)
            sums += product
    whole = output[..., ::-1].transpose(0, 2, 1, 3).reshape(len(left) * array.rows, -1)
    return Stepped(whole[:m, :n].copy(), len(left) * len(top) * (last + 1))


def _weights_held(array: SystolicArray, x: Array, values: Array, rows: NDArray[np.int64] | None) -> Stepped:
    """Step "ws": columns of x enter at the left and cross the weights; sums move down and leave at the bottom."""
    held, (m, reduction) = _held(values, array), x.shape
    if rows is None:
        moving = _delayed(_blocks(x.T, array.rows), array.columns - 1)
        return _sums(array, held, m, values.shape[1], lambda at, _: moving[at.down, None, :, at.window])
    around = array.rows + array.columns - 2
    inputs = np.zeros((m + 2 * around, reduction), x.dtype)  # inputs of one cycle side by side: they stay in the cache
    inputs[around : around + m] = x
    delay = np.arange(array.rows)[:, None] + np.arange(array.columns)[::-1]
    places = _held(rows, array) + (around - delay) * reduction
    flat = inputs.reshape(-1)

    def taken(at: _At, out: Array) -> Array:
        return np.take(flat[at.cycle * reduction :], places[at.down, at.across], out=out, mode="wrap")

    return _sums(array, held, m, values.shape[1], taken)


def _inputs_held(array: SystolicArray, x: Array, values: Array, rows: NDArray[np.int64] | None) -> Stepped:
    """Step "is": as "ws" with the operands' parts changed; of a sparse weight, a unit holds its group's inputs."""
    m, n = len(x), values.shape[1]
    moving = _delayed(_blocks(values, array.rows), array.columns - 1)
    if rows is None:
        held = _held(np.ascontiguousarray(x.T), array)
        found = _sums(array, held, n, m, lambda at, _: moving[at.down, None, :, at.window])
        return Stepped(found.output.T.copy(), found.cycles)
    across = -(-m // array.columns)
    picked = _Picked(x.T, rows, across * array.columns)
    tags = _delayed(_blocks(picked.starts, array.rows), array.columns - 1)
    lanes = _flipped(np.arange(across * array.columns)[None], array)[0][:, None]

    def taken(at: _At, out: Array) -> Array:
        found = picked.take(lanes[at.across] + tags[at.down, None, :, at.window], out)
        return np.multiply(found, moving[at.down, None, :, at.window], out=out)

    ones = np.ones((len(moving), across, array.rows, array.columns), x.dtype)
    found = _sums(array, ones, n, m, taken)
    return Stepped(found.output.T.copy(), found.cycles)


class _Picked:
    """Inputs that units pick by the row that a weight came from: lanes of one row lie side by side."""

    def __init__(self, lanes: Array, rows: NDArray[np.int64], width: int) -> None:
        self.inputs = np.zeros((len(lanes), width), lanes.dtype)
        self.inputs[:, : lanes.shape[1]] = lanes
        self.starts = rows * width

    def take(self, places: NDArray[np.int64], out: Array) -> Array:
        """Pick at starts plus lanes; the places lie within by construction, so that wrapping only saves a check."""
        return np.take(self.inputs.reshape(-1), places, out=out, mode="wrap")


@dataclass(frozen=True)
class _At:
    """Which folds are stepped, and the cycle after loading."""

    down: slice
    across: slice
    cycle: int
    columns: int

    @property
    def window(self) -> slice:
        """What the columns' registers show of a stream, the last column first."""
        return slice(self.cycle, self.cycle + self.columns)


def _sums(array: SystolicArray, held: Array, time: int, width: int, taken: Callable[[_At, Array], Array]) -> Stepped:
    """Load each fold's held values, then let sums move down through products with what crosses.

    Args:
        array: The array.
        held: What stays in the units, (folds down, folds across, rows, columns), the last column first.
        time: Values that cross in one fold.
        width: Columns of the output.
        taken: What each unit of some folds multiplies with at a cycle; it may be written to the array given.
    """
    output = np.zeros((time, held.shape[1], array.columns), held.dtype)
    last = time + array.rows + array.columns - 3
    delays = np.arange(array.columns)[::-1] + array.rows - 1
    for down, across in _chunks(array, *held.shape[:2]):
        loaded = np.zeros_like(held[down, across])
        for cycle in range(array.rows):
            loaded[..., 1:, :] = loaded[..., :-1, :].copy()
            loaded[..., 0, :] = held[down, across, array.rows - 1 - cycle]
        sums, product = np.zeros_like(loaded), np.empty_like(loaded)
        left = np.empty((last + 1, *loaded.shape[:2], array.columns), held.dtype)
        for cycle in range(last + 1):
            np.multiply(taken(_At(down, across, cycle, array.columns), product), loaded, out=product)
            product[..., 1:, :] += sums[..., :-1, :]
            left[cycle] = product[..., -1, :]
            sums, product = product, sums
        found = left.sum(1)
        for column, delay in enumerate(delays):
            output[:, across, column] += found[delay : delay + time, :, column]
    whole = output[..., ::-1].reshape(time, -1)[:, :width].copy()
    return Stepped(whole, held.shape[0] * held.shape[1] * (array.rows + last + 1))


def _chunks(array: SystolicArray, down: int, across: int) -> list[tuple[slice, slice]]:
    """Cut the folds into rectangles of about CHUNK units."""
    wide = min(across, max(1, CHUNK // array.units))
    high = max(1, CHUNK // (wide * array.units))
    return [
        (slice(i, min(i + high, down)), slice(j, min(j + wide, across)))
        for i in range(0, down, high)
        for j in range(0, across, wide)
    ]


def _blocks(lanes: Array, size: int) -> Array:
    """Cut lanes (lanes, time) into blocks of `size` lanes, zeros filling the last."""
    blocks = -(-len(lanes) // size)
    whole = np.zeros((blocks * size, lanes.shape[1]), lanes.dtype)
    whole[: len(lanes)] = lanes
    return whole.reshape(blocks, size, -1)


def _delayed(blocks: Array, reach: int) -> Array:
    """Let lane i of each block (blocks, lanes, time) start i later, `reach` zeros before the first and after the last.

    At cycle t a register j units from the edge shows index t + reach - j.
    """
    count, lanes, time = blocks.shape
    line = np.zeros((count, lanes, time + lanes - 1 + 2 * reach), blocks.dtype)
    for lane in range(lanes):
        line[:, lane, reach + lane : reach + lane + time] = blocks[:, lane]
    return line


def _from_above(values: Array, array: SystolicArray) -> Array:
    """Return columns of (time, n) as they move down: (folds across, time, columns), the last column first."""
    line = _delayed(_blocks(values.T, array.columns), array.rows - 1)
    return np.ascontiguousarray(line[:, ::-1].transpose(0, 2, 1))


def _flipped(values: Array, array: SystolicArray) -> Array:
    """Cut (lanes, width) into folds across, (lanes, folds, columns), the last column first."""
    lanes, width = values.shape
    across = -(-width // array.columns)
    whole = np.zeros((lanes, across * array.columns), values.dtype)
    whole[:, :width] = values
    return whole.reshape(lanes, across, array.columns)[..., ::-1]


def _held(values: Array, array: SystolicArray) -> Array:
    """Cut (reduction, width) into folds (down, across, rows, columns), the last column first."""
    across = _flipped(values, array)
    down = _blocks(across.reshape(len(values), -1), array.rows)
    return np.ascontiguousarray(down.reshape(len(down), array.rows, *across.shape[1:]).transpose(0, 2, 1, 3))
