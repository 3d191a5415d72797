"""Peak: the most memory that a model holds while it runs, in every runtime, each in a process of its own.

Counted from what the process holds once its libraries are loaded (torch, ours, theirs; ours after a compile of
something small): weights, what is packed from them and intermediates count, code does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from cases.peak_child import RUNTIMES
from models.fusion import FUSION
from twofour.errors import DataError, MeasureError
from twofour.measure import machine, write_json

BENCHMARKS = Path(__file__).resolve().parent.parent


def run(models: Sequence[str], path: Path) -> dict[str, object]:
    """Run every model in every runtime, write what was found to `path` and return it.

    Raises:
        DataError: There is no such model.
        MeasureError: A process failed.
    """
    for name in models:
        if name not in FUSION:
            raise DataError(f"there is no model {name!r}", got=name, wanted=f"one of {', '.join(FUSION)}")
    rows = [row(name) for name in track(models, "running", console=Console(stderr=True), transient=True)]
    found: dict[str, object] = {"case": "peak", "rows": rows, "machine": machine()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return found


def row(model: str) -> dict[str, object]:
    """Return one model's bytes: its weights, and the peak by runtime."""
    with tempfile.TemporaryDirectory() as folder:
        weights = _child("export", model, folder)  # a process that exports a model is never as small again
        return {"model": model, "weights": weights, "peak": {name: _child(name, model, folder) for name in RUNTIMES}}


def _child(task: str, model: str, folder: str) -> int:
    # glibc keeps freed blocks of up to 32 MB for later; told not to, the process shows what is alive.
    settings = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cases.peak_child", task, model, folder]
    environment = {**os.environ, **settings, "PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise MeasureError(f"{model} did not run in {task}", got=done.stderr[-400:])
    return int(json.loads(done.stdout.splitlines()[-1]))


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows as text, in megabytes."""
    rows = [
        [row["model"], f"{row['weights'] / 1e6:.0f}", *(f"{row['peak'][name] / 1e6:.0f}" for name in RUNTIMES)]
        for row in found["rows"]
    ]
    return ["megabytes", "weights", *RUNTIMES], rows
