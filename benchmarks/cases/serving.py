"""Serving: how long until two workers of a web server answer with MiniLM, eager and from a saved file of ours.

The starts of the engines take turns, on the machine as it is and with two busy loops beside them. No cache of times is
there: what a worker knows of its kernels stands in the file.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

import twofour
from cases import worker
from twofour.errors import MeasureError
from twofour.measure import machine, write_json

WORKERS = 2
LOOPS = 2
LONGEST_START = 600.0
ALLOWED = 1.2
"""Times the start of plain eager that a start from a file may take."""


def run(starts: int, path: Path) -> dict[str, object]:
    """Save MiniLM, start the servers in turns and write what was found to `path`.

    Raises:
        MeasureError: A server did not start.
    """
    found: dict[str, object] = {"case": "serving", "model": "minilm", "dtype": "float32", "workers": WORKERS}
    with tempfile.TemporaryDirectory(prefix="twofour-serving-") as folder:
        files = {engine: Path(folder) / f"{engine}.safetensors" for engine in ("layers", "graph")}
        for engine, file in files.items():
            _save(file, graph=engine == "graph")
        for state in ("as it is", "busy"):
            with _busy(LOOPS if state == "busy" else 0):
                found[state] = _starts({"eager": Path(folder), **files}, starts)
    found |= {"starts": starts, "loops": LOOPS, "machine": machine()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return found


def _save(file: Path, graph: bool) -> None:
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(1)
    folder = worker.weights()
    inputs = AutoTokenizer.from_pretrained(folder)([worker.TEXT], return_tensors="pt")
    model = twofour.prune(AutoModel.from_pretrained(folder).eval(), "2:4")
    twofour.save(twofour.compile(model, dict(inputs), graph=graph), file)


def _starts(files: dict[str, Path], starts: int) -> dict[str, dict[str, object]]:
    """Start each engine's server `starts` times, in turns; return wall and processor seconds until all workers answer.

    Processor seconds are those of all processes of the server, its end included.
    """
    wall: dict[str, list[float]] = {engine: [] for engine in files}
    processor: dict[str, list[float]] = {engine: [] for engine in files}
    for turn in range(starts):
        for engine in [*files][turn % len(files) :] + [*files][: turn % len(files)]:
            seconds, used = _start(engine, files[engine])
            wall[engine].append(round(seconds, 3))
            processor[engine].append(round(used, 3))
    return {
        engine: {
            "seconds": statistics.median(wall[engine]),
            "ratio": statistics.median(wall[engine]) / statistics.median(wall["eager"]),
            "processor_seconds": statistics.median(processor[engine]),
            "processor_ratio": statistics.median(processor[engine]) / statistics.median(processor["eager"]),
            "all_seconds": wall[engine],
            "all_processor_seconds": processor[engine],
        }
        for engine in files
    }


def _start(engine: str, file: Path) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="twofour-ready-") as ready:
        own = {worker.ENGINE: engine, worker.FILE: str(file), worker.READY: ready}
        path = str(Path(__file__).resolve().parent.parent)
        environment = {**os.environ, **own, "OMP_NUM_THREADS": "1", "TWOFOUR_CACHE": "off", "PYTHONPATH": path}
        command = [sys.executable, "-m", "uvicorn", "cases.worker:create", "--factory", "--workers", str(WORKERS)]
        command += ["--uds", f"{ready}.socket", "--log-level", "warning"]
        before, begin = _used(), time.perf_counter()
        server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            while len(list(Path(ready).iterdir())) < WORKERS:
                if server.poll() is not None or time.perf_counter() - begin > LONGEST_START:
                    break
                time.sleep(0.01)
            seconds, ready_workers = time.perf_counter() - begin, len(list(Path(ready).iterdir()))
        finally:
            server.terminate()
            said = server.communicate()[1]
    if ready_workers < WORKERS:
        raise MeasureError(f"the server of {engine} did not start", got=said[-400:])
    return seconds, _used() - before


def _used() -> float:
    used = os.times()
    return used.children_user + used.children_system


@contextmanager
def _busy(loops: int) -> Iterator[None]:
    """Keep processors busy meanwhile."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for loop in running:
            loop.kill()
            loop.wait()


def show(found: dict[str, object], console: Console) -> None:
    """Print the starts beside those of eager."""
    for state in ("as it is", "busy"):
        engines = found[state]
        assert isinstance(engines, dict)
        for engine, times in engines.items():
            console.print(
                f"{state:9} {engine:7} {WORKERS} workers in {times['seconds']:6.2f} s, {times['ratio']:.2f}x eager; "
                f"{times['processor_seconds']:6.2f} s of processor time, {times['processor_ratio']:.2f}x",
                highlight=False,
            )
    console.print(f"allowed: {ALLOWED}x the time of eager", highlight=False)
