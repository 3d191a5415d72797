"""Threads that wait by spinning: when a process is told, and what the command does about it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from twofour.native import waiting


@pytest.mark.parametrize(
    ("threads", "load", "variable", "told"),
    [(2, 13.0, None, True), (2, 0.3, None, False), (1, 13.0, None, False), (2, 13.0, "OMP_WAIT_POLICY", False)],
)
def test_a_busy_machine_is_told_of_where_threads_spin(
    threads: int, load: float, variable: str | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in waiting.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "passive")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    said = waiting.contended()
    assert (said is not None) == told
    assert said is None or ("13.0 to run already" in said and "OMP_WAIT_POLICY=passive" in said)


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is Linux's")
@pytest.mark.parametrize(
    ("given", "want"),
    [({}, "10000"), pytest.param({"GOMP_SPINCOUNT": "77"}, "77", marks=pytest.mark.long)],
)
def test_the_commands_threads_sleep_soon(given: dict[str, str], want: str) -> None:
    """The runtime itself says what it has read."""
    environment = {name: value for name, value in os.environ.items() if name not in waiting.VARIABLES}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **given}
    command = [sys.executable, "-m", "twofour", "--help"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    if "GOMP_SPINCOUNT" not in run.stderr:
        pytest.skip("torch's OpenMP runtime is not libgomp")
    assert f"GOMP_SPINCOUNT = '{want}'" in run.stderr
