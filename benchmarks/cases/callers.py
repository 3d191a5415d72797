"""Callers: threads of one process that call one compiled model at the same time, and the memory that calls leave.

Torch and our kernels have one thread in each call. What callers get together is set beside what one of them gets alone
and beside the cores that they may run on.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import threading
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import twofour
from cases import worker
from twofour.measure import machine, write_json

CALLERS = (1, 2, 4)
ROUNDS = 5
SHAPES = ((1, 16), (1, 48), (4, 24), (2, 96))
MIXED = 10_000


def run(seconds: float, mixed: int, path: Path) -> dict[str, object]:
    """Compile MiniLM, call it from several threads and with many shapes, and write what was found to `path`.

    Args:
        seconds: Of one round of one number of callers.
        mixed: Calls of random shapes whose memory is watched.
        path: File of the record.
    """
    from transformers import AutoModel

    torch.set_num_threads(1)
    model = twofour.prune(AutoModel.from_pretrained(worker.weights()).eval(), "2:4")
    calls = [_call(*shape) for shape in SHAPES]
    fast = twofour.compile(model, calls[2])
    found: dict[str, Any] = {"case": "callers", "model": "minilm", "cores": len(os.sched_getaffinity(0))}
    rates: dict[int, list[float]] = {count: [] for count in CALLERS}
    with torch.inference_mode():
        for call in calls * 3:
            fast(**call)
        for _ in range(ROUNDS):
            for count in CALLERS:
                rates[count].append(_rate(fast, calls, count, seconds))
    medians = {count: sorted(rate)[ROUNDS // 2] for count, rate in rates.items()}
    found["calls a second"] = {str(count): rate for count, rate in medians.items()}
    found["of the cores"] = {
        str(count): rate / medians[1] / min(count, found["cores"]) for count, rate in medians.items()
    }
    found["memory"] = _memory(fast, mixed)
    found["machine"] = machine()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return found


def _call(batch: int, length: int) -> dict[str, Any]:
    ids = torch.randint(1000, 20000, (batch, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _rate(fast: Any, calls: list[dict[str, Any]], count: int, seconds: float) -> float:
    """Return the calls a second of so many callers together."""
    done, stop, ready = [0] * count, threading.Event(), threading.Barrier(count + 1)

    def caller(index: int) -> None:
        ready.wait()
        with torch.inference_mode():
            while not stop.is_set():
                fast(**calls[done[index] % len(calls)])
                done[index] += 1

    threads = [threading.Thread(target=caller, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    ready.wait()
    begin = time.perf_counter()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - begin)


def _memory(fast: Any, mixed: int) -> dict[str, float]:
    """Return the megabytes of the process after a tenth of the calls and after all, shapes drawn anew for each."""
    draw = random.Random(0)
    marks: dict[str, float] = {}
    with torch.inference_mode():
        for index in range(mixed):
            fast(**_call(draw.randint(1, 4), draw.randint(4, 64)))
            if index + 1 in (mixed // 10, mixed):
                gc.collect()
                marks["after a tenth" if index + 1 < mixed else "after all"] = _resident()
    return marks | {"calls": mixed, "growth MB": marks["after all"] - marks["after a tenth"], "peak MB": _peak()}


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def show(found: dict[str, Any], console: Console) -> None:
    """Print what callers get, and how memory grows."""
    for count, rate in found["calls a second"].items():
        share = found["of the cores"][count]
        console.print(f"{count} callers: {rate:8.1f} calls/s, {share:.2f} of the cores they may use", highlight=False)
    memory = found["memory"]
    console.print(
        f"{memory['calls']} calls of mixed shapes: {memory['after a tenth']:.1f} MB after a tenth, "
        f"{memory['after all']:.1f} MB after all",
        highlight=False,
    )
