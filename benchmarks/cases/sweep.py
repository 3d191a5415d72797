"""Sweep: models that nothing was tuned for, by the call that README shows, against the best dense runtime.

`compile(model, example)` with nothing else said, dense and 2:4; both are compared with the fastest of torch,
`torch.compile`, ONNX Runtime and OpenVINO of the same type. Where ours is slower than that by more than the A/A noise
of the cell, the table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

import twofour
from cases import models
from cases.models import DENSE, EAGER, INDUCTOR, OPENVINO, ORT, SPARSE, Builders, Side
from cases.table import show_lines
from models import Subject
from models.sweep import IMAGES, SWEEP, subject
from twofour import engines
from twofour.errors import DataError
from twofour.measure import Record

PEERS = (EAGER, INDUCTOR, ORT, OPENVINO)
OURS = (DENSE, SPARSE)
HEADS = ("model; batch x tokens", "best peer", "its ms", "dense / it", "2:4 / it", "A/A", "slower than noise")


def cells(
    names: Sequence[str], dtype: str, batches: Sequence[int], lengths: Sequence[int], threads: Sequence[int]
) -> list[dict[str, object]]:
    """List the cells; images have no lengths.

    Raises:
        DataError: There is no such model.
    """
    if unknown := [name for name in names if name not in SWEEP]:
        raise DataError(f"there is no model {unknown[0]!r}", got=unknown[0], wanted=f"one of {', '.join(SWEEP)}")
    return [
        {"case": "sweep", "model": name, "dtype": dtype, "batch": batch, "tokens": length, "threads": count}
        for name in names
        for batch in batches
        for length in ([1] if name in IMAGES else lengths)
        for count in threads
    ]


class Bench(models.Bench):
    """Measures cells."""

    def make(self, cell: dict[str, object]) -> Subject:
        """Build the model of a cell with its inputs."""
        return subject(str(cell["model"]), int(str(cell["batch"])), int(str(cell["tokens"])))

    def peers(self, subject: Subject, pruned: Subject, dtype: str, threads: int) -> dict[str, Callable[[], Any]]:
        """Return what builds the dense runtimes."""
        found = super().peers(subject, pruned, dtype, threads)
        return {name: found[name] for name in PEERS}

    def ours(self, side: Side, subject: Subject, dtype: str, reference: np.ndarray) -> Builders:
        """Return the dense model by the default call."""
        return {DENSE: (partial(default, side, DENSE, subject, dtype), reference)}

    def ours_pruned(self, side: Side, pruned: Subject, dtype: str, reference: np.ndarray) -> Builders:
        """Return the 2:4 model by the default call."""
        return {SPARSE: (partial(default, side, SPARSE, pruned, dtype), reference)}


def default(side: Side, name: str, subject: Subject, dtype: str) -> Callable[[], Any]:
    """Compile as README does: the model and an example; a type where it is another one; int8 with its data."""
    given: dict[str, Any] = {} if dtype == "float32" else {"dtype": dtype}
    if dtype == "int8":
        given["data"] = [subject.inputs]
    fast = twofour.compile(subject.model, subject.inputs, **given)
    side.plans[name], side.accounts[name] = str(fast.plan), fast.plan.account
    return partial(engines.first_output, fast, subject.inputs)


def line(record: Record) -> list[str]:
    """Return what stands under `HEADS`."""
    best = record.fastest(record.baseline)
    noise = record.noise or 0.0
    ratios = {name: record.median(name) / record.median(best) for name in OURS if name in record.timings}
    slower = [name.removeprefix("twofour ") for name, ratio in ratios.items() if ratio > 1 + noise]
    place = f"{record.meta['batch']}" + ("" if record.meta["model"] in IMAGES else f" x {record.meta['tokens']}")
    told = (f"{ratios[name]:.2f}" if name in ratios else "-" for name in OURS)
    head = f"{record.meta['model']}; {place}"
    return [head, best, f"{1e3 * record.median(best):.2f}", *told, f"{noise:.0%}", ", ".join(slower)]


def show(records: Sequence[Record], console: Console) -> None:
    """Print a line per cell, then what was not built and why."""
    show_lines(records, HEADS, line, console)
