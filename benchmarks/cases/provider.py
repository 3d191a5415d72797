"""Provider: MiniLM with 2:4 zeros as ONNX files in ONNX Runtime, with its CPU provider and with libtwofour's before it.

Both sessions are in one process and run in turns on the same inputs; the files are what torch's exporter and ours
write. Where there is a C compiler the same is measured by examples/onnxruntime/run.c.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import twofour
from cases.columns import headed
from cases.records import machine_line
from models import Subject
from models.encoder import SEQUENCE, minilm
from twofour import engines, measure
from twofour.errors import DataError
from twofour.export.onnxruntime import add_provider
from twofour.export.runtime import library
from twofour.measure import Record

CPU, OURS = "CPU provider", "with twofour"
EXPORTERS = ("torch", "twofour")
"""`torch.onnx.export`, and `twofour export`."""

SIZES = ((1, 16), (1, 128), (8, 128))
"""Batch and length; our exporter frees the first alone, so it has those of its example's length."""

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "onnxruntime" / "run.c"


def cells(exporters: Sequence[str], threads: Sequence[int]) -> list[dict[str, object]]:
    """List the cells.

    Raises:
        DataError: There is no such exporter.
    """
    if unknown := [name for name in exporters if name not in EXPORTERS]:
        raise DataError("there is no such exporter", got=unknown[0], wanted=", ".join(EXPORTERS))
    case = {"case": "provider", "dtype": "float32"}
    return [
        {**case, "model": f"minilm, {name}", "exporter": name, "batch": batch, "lengths": length, "threads": count}
        for name in exporters
        for count in threads
        for batch, length in SIZES
        if name == "torch" or length == SEQUENCE
    ]


class Bench:
    """Measures cells.

    Args:
        seconds: Time box of a cell.
        folder: Where files are written.
    """

    def __init__(self, seconds: float, folder: Path) -> None:
        self.seconds = seconds
        self.subject: Callable[[int], Subject] = minilm
        self.path = folder / "model.onnx"
        self.made: tuple[object, ...] = ()
        self.sessions: dict[str, Any] = {}
        self.facts: dict[str, object] = {}

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        exporter, batch, length, threads = (cell[name] for name in ("exporter", "batch", "lengths", "threads"))
        assert isinstance(batch, int) and isinstance(length, int) and isinstance(threads, int)
        if self.made != (exporter, threads):
            self._sessions(str(exporter), threads)
            self.made = exporter, threads
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1000, 20_000, (batch, length), generator=generator)
        names = [entry.name for entry in self.sessions[CPU].get_inputs()]
        feed = dict(zip(names, (ids.numpy(), torch.ones_like(ids).numpy()), strict=True))
        calls = {name: partial(session.run, None, feed) for name, session in self.sessions.items()}
        answers = [torch.from_numpy(call()[0]).double() for call in calls.values()]
        error = float((answers[0] - answers[1]).abs().max() / answers[0].abs().max())
        by_c = _by_c(self.path, length, threads) if batch == 1 else {}
        meta = {**cell, **self.facts, "error": error, "by_c": by_c}
        return measure.compare(calls, baseline=[CPU], seconds=self.seconds, threads=threads, noise=True, meta=meta)

    def _sessions(self, exporter: str, threads: int) -> None:
        """Write the file and make both sessions of it, one after the other."""
        import onnxruntime

        path = self.path
        self.sessions.clear()
        subject = self.subject(1)
        model = twofour.prune(copy.deepcopy(subject.model), "2:4").eval().requires_grad_(False)
        if exporter == "torch":
            engines.export(replace(subject, model=model), path, free=(0, 1))
        else:
            twofour.export.to_onnx(model, path, subject.inputs)
        resident = {}
        for name in (CPU, OURS):
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
            before = _resident()
            if name == OURS:
                made = onnxruntime.InferenceSession(str(path), add_provider(options, threads=threads))
            else:
                made = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            self.sessions[name] = made
            resident[name] = _resident() - before
        self.facts = {"file_bytes": path.stat().st_size, "resident": resident, "onnxruntime": onnxruntime.__version__}


def _resident() -> int:
    """Return the bytes of this process that are in memory, without what the allocator only keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _by_c(path: Path, length: int, threads: int, runs: int = 100) -> dict[str, float]:
    """Return the median seconds of both on a sequence of ones, from the C example; none without a compiler."""
    import onnxruntime

    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    (own,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
    built = path.parent / "run"
    subprocess.run([compiler, "-std=c99", "-O2", EXAMPLE, "-o", built, "-ldl", "-lm"], check=True)
    sizes = ["--size", str(length), "--runs", str(runs), "--threads", str(threads)]
    said = subprocess.run([built, own, library(), path, *sizes], capture_output=True, text=True, check=True).stdout
    found = re.search(r"CPU provider ([\d.]+) ms.*with twofour ([\d.]+) ms", said)
    assert found, said
    return {CPU: float(found[1]) / 1e3, OURS: float(found[2]) / 1e3}


def show(records: Sequence[Record], console: Console) -> None:
    """Print milliseconds and ratios."""
    table = headed(HEADS)
    for record in records:
        table.add_row(*line(record))
    console.print(table)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)


HEADS = ("file; batch x tokens", CPU + ", ms", OURS + ", ms", "times as fast", "from C", "MB of the sessions")


def line(record: Record) -> list[str]:
    """Return a row under HEADS."""
    meta: Any = record.meta
    cpu, ours = record.median(CPU), record.median(OURS)
    by_c = meta["by_c"]
    resident = meta["resident"]
    return [
        f"{meta['exporter']}; {meta['batch']} x {meta['lengths']}",
        f"{1e3 * cpu:.2f}",
        f"{1e3 * ours:.2f}",
        f"{cpu / ours:.2f}",
        f"{by_c[CPU] / by_c[OURS]:.2f}" if by_c else "-",
        f"{resident[CPU] / 1e6:.0f}, {resident[OURS] / 1e6:.0f}",
    ]
