"""The benchmark suite, run in a process of its own or in the tests', and records made up for its tables."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from tests.conftest import threads
from twofour import measure

ROOT = Path(__file__).resolve().parents[2] / "benchmarks"


def suite(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "run.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def here(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the suite inside this process, which has imported torch already; the fixture `benchmarks` finds it."""
    from run import main

    out, errors, before = io.StringIO(), io.StringIO(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as given, redirect_stdout(out), redirect_stderr(errors), threads(before):
        given.setattr(sys, "argv", ["run.py", *words])
        with pytest.raises(SystemExit) as end:
            main()
    return subprocess.CompletedProcess(words, end.value.code or 0, out.getvalue(), errors.getvalue())  # type: ignore[arg-type]


def record(times: dict[str, float], baseline: tuple[str, ...], **meta: object) -> measure.Record:
    timings = {name: measure.Timing(*(seconds,) * 4, 5, 1) for name, seconds in times.items()}
    return measure.Record(timings, baseline, meta=meta, machine=measure.machine())
