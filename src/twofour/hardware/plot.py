"""plot: a machine's roofline with the products of a model on it, and the speed-up of 2:4 against the reduction."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from twofour.drawing import drawn
from twofour.errors import HardwareError
from twofour.hardware.costs import costs
from twofour.hardware.estimate import Estimate
from twofour.hardware.machine import BITS, Machine, stored_bytes
from twofour.hardware.machines import machine as find

REDUCTIONS = 2 ** np.arange(7, 16)
SIDES = (512, 2048, 4096, 10240)
COLOURS = {False: "#1f4e79", True: "#2f7d32"}


def plot(
    machine: str | Machine, path: str | os.PathLike[str], *, dtype: str = "bfloat16", rows: Estimate | None = None
) -> Path:
    """Draw the roofline of a machine, dense and 2:4, and its predicted speed-up against K; needs matplotlib.

    Args:
        machine: A name in `MACHINES`, or a machine.
        path: File to write, .svg, .png or .pdf.
        dtype: Computing type.
        rows: An estimate whose products are marked on the roofline.

    Raises:
        HardwareError: matplotlib is not installed, the file cannot be written, or the machine has no such unit.
    """
    device, target = find(machine), Path(path)
    for sparse in (False, True):
        device.peak(dtype, sparse=sparse)
    with drawn(target, (10, 4), HardwareError, "Estimate.to_dict()") as figure:
        left, right = figure.subplots(1, 2)
        _roofline(left, device, dtype, rows)
        _speedup(right, device, dtype)
    return target


def _roofline(axes: Any, device: Machine, dtype: str, rows: Estimate | None) -> None:
    intensity = np.geomspace(1, 1e4, 200)
    for sparse in (False, True):
        peak = device.peak(dtype, sparse=sparse) / 1e12
        label = f"{'2:4' if sparse else 'dense'}: {peak:.0f} TFLOP/s"
        axes.loglog(
            intensity, np.minimum(peak, intensity * device.bandwidth / 1e12), color=COLOURS[sparse], label=label
        )
        if rows is None:
            continue
        points = [
            (2 * row.m * row.n * row.k * row.batch, time, row)
            for row in rows.rows
            if (time := row.sparse_ms if sparse else row.dense_ms) is not None
        ]
        x = [flops / _bytes(row, dtype, sparse) for flops, _, row in points]
        axes.plot(x, [flops / time / 1e9 for flops, time, _ in points], "o", ms=3, color=COLOURS[sparse])
    axes.set_xlabel("operations per byte of memory, counted as if dense")
    axes.set_ylabel("TFLOP/s, counted as if dense")
    axes.set_title(f"{device.name}, {dtype}: roofline")
    axes.legend(fontsize=7)


def _bytes(row: Any, dtype: str, sparse: bool) -> float:
    value, weight = BITS[dtype] / 8, stored_bytes(dtype, sparse=sparse)
    return row.batch * (row.m * row.k * value + row.n * row.k * weight + row.m * row.n * 2)


def _speedup(axes: Any, device: Machine, dtype: str) -> None:
    for side in SIDES:
        dense, sparse = (costs(device, dtype, s, side, side, REDUCTIONS).seconds for s in (False, True))
        axes.semilogx(REDUCTIONS, dense / sparse, marker="o", ms=3, base=2, label=f"M = N = {side}")
    axes.axhline(1, color="gray", lw=0.8)
    axes.set_xlabel("K")
    axes.set_ylabel("predicted dense time / 2:4 time")
    axes.set_title("speed-up against the reduction")
    axes.legend(fontsize=7)
