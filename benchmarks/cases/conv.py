"""Conv: the best dense convolution against the best 2:4 one, per geometry, batch and thread count, channels last.

Both sides allocate their output and add the bias inside the timing; weights are prepared outside it and stay in the
caches. Dense candidates are torch's channels-last convolution and oneDNN on a weight reordered once. Rows whose error
is larger than a sum's (Winograd's) stand beside both: they are dense, and no baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cases.records import machine_line
from cases.shapes import Convolution
from twofour import measure, patterns
from twofour.errors import KernelError, MeasureError
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry
from twofour.kernels.table import convolutions
from twofour.measure import Record, geometric_mean

TWO_FOUR = patterns.parse("2:4")

TOLERANCE = 1e-5


def cells(
    shapes: Sequence[Convolution], batches: Sequence[int], threads: Sequence[int], dtype: str
) -> list[dict[str, object]]:
    """List the cells.

    Raises:
        KernelError: There are no sparse convolutions in this dtype.
    """
    if dtype != "float32":
        raise KernelError("this benchmark times convolutions in float32", got=dtype, wanted="float32")
    return [
        {
            "case": "conv",
            "dtype": dtype,
            "name": shape.name,
            "geometry": shape.text,
            "work": shape.work * batch,
            "sizes": [shape.rows, shape.columns, shape.kernel, shape.stride, shape.height, shape.width],
            "batch": batch,
            "threads": count,
        }
        for shape in shapes
        for batch in batches
        for count in threads
    ]


class Bench:
    """Measures cells."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        rows, columns, kernel, stride, height, width = cell["sizes"]  # pyright: ignore
        geometry = Geometry(
            columns, rows, (kernel, kernel), (stride, stride), (kernel // 2, kernel // 2), (kernel // 2, kernel // 2)
        )
        batch, threads = int(str(cell["batch"])), int(str(cell["threads"]))
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(rows, columns, kernel, kernel, generator=generator) * (columns * kernel**2) ** -0.5
        keep = TWO_FOUR.project(weight.permute(0, 2, 3, 1).contiguous(), absolute=True)
        weight *= keep.permute(0, 3, 1, 2)
        x = torch.randn(batch, columns, height, width, generator=generator).to(memory_format=torch.channels_last)
        with torch.inference_mode():
            kernels = _rows(geometry)
            candidates = _candidates(kernels, geometry, weight, torch.randn(rows, generator=generator), x)
            _verify(candidates, str(cell["geometry"]))
            return measure.compare(
                candidates,
                baseline=tuple(kernel.name for kernel in kernels if not kernel.sparse and not kernel.close),
                seconds=self.seconds,
                threads=threads,
                clock="thread" if threads == 1 else "wall",
                pin=threads == 1,
                noise=True,
                meta=cell,
            )


def _candidates(
    kernels: Sequence[ConvKernel], geometry: Geometry, weight: Tensor, bias: Tensor, x: Tensor
) -> dict[str, Callable[[], Tensor]]:
    images = x.shape[0], x.shape[2], x.shape[3]
    return {
        kernel.name: partial(kernel.run, x, kernel.prepare(weight, geometry, images), bias, ConvProblem.of(geometry))
        for kernel in kernels
    }


def _rows(geometry: Geometry) -> list[ConvKernel]:
    """Return the rows of float32, of dense and of 2:4 weights, that take this geometry.

    Scalar ones are among them only where no other is sparse.
    """
    found = [k for k in convolutions() if k.dtype == "float32" and k.refuses(geometry) is None]
    found = [kernel for kernel in found if not kernel.sparse or kernel.takes(TWO_FOUR)]
    faster = [kernel for kernel in found if kernel.isa != "scalar"]
    return faster if any(kernel.sparse for kernel in faster) else found


def _verify(candidates: dict[str, Callable[[], Tensor]], geometry: str) -> None:
    exact = next(call() for name, call in candidates.items() if name.startswith("dense_"))
    for name, call in candidates.items():
        error = float((call() - exact).norm() / exact.norm())
        if not error <= TOLERANCE:
            raise MeasureError(f"{name} is wrong and is not timed", got=f"error {error:.2e} at {geometry}")


def show(records: Sequence[Record], console: Console) -> None:
    """Print each geometry with its times, the ratio and what won, then the geometric means."""
    table = Table(box=None, pad_edge=False)
    columns = ("name", "geometry", "batch", "threads", "dense ms", "by", "2:4 ms", "by", "ratio", "A/A", "GFLOP/s")
    columns += ("close ms", "by", "ratio")
    for name in columns:
        table.add_column(name, justify="left" if name in ("name", "geometry", "by") else "right")
    for record in records:
        dense, ours = record.fastest(record.baseline), record.fastest(sparse_names(record))
        table.add_row(
            *(str(record.meta[name]) for name in ("name", "geometry", "batch")),
            str(record.threads),
            f"{record.median(dense) * 1e3:.4f}",
            dense,
            f"{record.median(ours) * 1e3:.4f}",
            ours,
            f"{record.ratio(ours):.2f}",
            f"{record.noise or 0:.0%}",
            f"{2 * int(str(record.meta['work'])) / record.median(ours) / 1e9:.0f}",
            *_close_cells(record),
        )
    console.print(table)
    for threads in dict.fromkeys(record.threads for record in records):
        ratios = [r.ratio(r.fastest(sparse_names(r))) for r in records if r.threads == threads]
        mean = f"geometric mean {geometric_mean(ratios):.2f}, smallest {min(ratios):.2f}"
        console.print(f"{threads} thread{'s'[: threads > 1]}: best dense / best 2:4: {mean}", highlight=False)
        if ratios := [r.ratio(r.fastest(names)) for r in records if r.threads == threads and (names := close_names(r))]:
            mean = f"geometric mean {geometric_mean(ratios):.2f}, smallest {min(ratios):.2f} of {len(ratios)}"
            console.print(f"best dense / best close: {mean}", highlight=False)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)


def sparse_names(record: Record) -> list[str]:
    """Return the names of the sparse candidates."""
    return [name for name in record.timings if name.startswith("nm_")]


def close_names(record: Record) -> list[str]:
    """Return the names of the dense candidates whose error is larger than a sum's."""
    return [name for name in record.timings if name not in (*record.baseline, *sparse_names(record))]


def _close_cells(record: Record) -> tuple[str, str, str]:
    if not (names := close_names(record)):
        return "-", "-", "-"
    best = record.fastest(names)
    return f"{record.median(best) * 1e3:.4f}", best, f"{record.ratio(best):.2f}"
