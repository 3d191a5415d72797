"""Peak: what a process grows by to serve a model, in every runtime, each in a process of its own, malloc as it is.

Counted from what the process holds once its libraries are loaded (torch, ours, theirs; ours after a compile of
something small): weights, what is packed from them and intermediates count, code does not. `held` is what it holds
after calls like each other, `peak` the most during such a call. The loaded ones read a file of the compiled one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any, cast

from rich.console import Console

from cases.columns import headed
from cases.peak_child import CONVERT, EXPORT, RUNTIMES, TYPES
from cases.records import machine_line
from models.memory import MEMORY
from twofour.errors import DataError, MeasureError
from twofour.measure import Record, Timing, machine

BENCHMARKS = Path(__file__).resolve().parent.parent


def cells(models: Sequence[str], dtypes: Sequence[str]) -> list[dict[str, object]]:
    """List the cells.

    Raises:
        DataError: There is no such model, or nothing is measured in that type.
    """
    for names, known, what in ((models, MEMORY, "model"), (dtypes, TYPES, "type")):
        for name in names:
            if name not in known:
                raise DataError(f"there is no {what} {name!r}", got=name, wanted=f"one of {', '.join(known)}")
    return [{"case": "peak", "model": model, "dtype": dtype} for dtype in dtypes for model in models]


class Bench:
    """Measures cells: a process for each runtime."""

    def __init__(self, without: Sequence[str] = ()) -> None:
        self.without = without

    def __call__(self, cell: dict[str, object]) -> Record:
        """Return the bytes of one model in each runtime; the times are of its own calls, one process after another."""
        model, dtype = str(cell["model"]), str(cell["dtype"])
        held: dict[str, int] = {}
        peak: dict[str, int] = {}
        timings: dict[str, Timing] = {}
        with tempfile.TemporaryDirectory() as folder:
            weights = _child(EXPORT, model, dtype, folder)  # a process that exports a model is never as small again
            _child(CONVERT, model, dtype, folder)
            for name in RUNTIMES:
                if name in self.without or not (found := _child(name, model, dtype, folder)):
                    continue
                held[name], peak[name], seconds = found
                lower, median, upper = quantiles(seconds, n=4, method="inclusive")
                timings[name] = Timing(median, lower, upper, min(seconds), len(seconds), 1)
        meta = {**cell, "weights": weights, "held": held, "peak": peak}
        return Record(timings, threads=1, meta=meta, machine=machine())


def _child(task: str, model: str, dtype: str, folder: str) -> Any:
    command = [sys.executable, "-m", "cases.peak_child", task, model, dtype, folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise MeasureError(f"{model} did not run in {task}, {dtype}", got=done.stderr[-400:])
    return json.loads(done.stdout.splitlines()[-1])


def lines(records: Sequence[Record]) -> list[list[str]]:
    """Return heads and rows: megabytes held, in brackets the most during a call; "-": there is no such model."""
    rows = [["MB held (most in a call)", "weights", *RUNTIMES]]
    for record in records:
        meta = cast("Mapping[str, Any]", record.meta)
        cells = [f"{held / 1e6:.0f} ({peak / 1e6:.0f})" for held, peak in map(_of(meta), RUNTIMES)]
        cells = [cell if name in meta["held"] else "-" for name, cell in zip(RUNTIMES, cells, strict=True)]
        rows.append([f"{meta['model']}, {meta['dtype']}", f"{meta['weights'] / 1e6:.0f}", *cells])
    return rows


def _of(meta: Mapping[str, Any]) -> Callable[[str], tuple[int, int]]:
    return lambda name: (meta["held"].get(name, 0), meta["peak"].get(name, 0))


def show(records: Sequence[Record], console: Console) -> None:
    """Print the megabytes."""
    heads, *rows = lines(records)
    table = headed(heads)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(machine_line(records[-1]), highlight=False)
