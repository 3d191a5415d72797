"""Memory: how much a process grows while it compiles a model of more than 1 GB, and what it holds afterwards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import twofour
from twofour.measure import machine, write_json

LAYERS, WIDTH = 17, 4096
"""17 layers of 4096x4096 in float32: 1.14 GB."""


def run(dtype: str, memory: str, path: Path) -> dict[str, object]:
    """Compile in a fresh process, write what was found to `path` and return it."""
    command = [sys.executable, "-m", "cases.memory", dtype, memory]
    # glibc keeps freed blocks of up to 32 MB for later; told not to, the process shows what is alive.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    environment = {**os.environ, **allocator, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise twofour.errors.MeasureError("the model was not compiled", got=done.stderr[-400:])
    found: dict[str, object] = {**json.loads(done.stdout.splitlines()[-1]), "machine": machine()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return found


def child(dtype: str, memory: str) -> dict[str, object]:
    """Build, prune and compile the model here, watching this process's memory."""
    torch.set_num_threads(1)
    warm = twofour.prune(nn.Linear(256, 256), "2:4")
    twofour.compile(warm, torch.randn(8, 256), dtype, memory=memory)  # code and libraries that are loaded once
    trim()
    empty = resident()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).eval()
    twofour.prune(model, "2:4")
    example = torch.randn(8, WIDTH)
    trim()
    dense = sum(p.numel() * 4 for p in model.parameters())
    before = resident()
    with Peak() as peak:
        fast = twofour.compile(model, example, dtype, memory=memory)
    after = resident()
    del model
    trim()
    plan = fast.plan
    return {
        "case": "memory",
        "dtype": dtype,
        "memory": memory,
        "dense_bytes": dense,
        "largest_layer_bytes": dense // LAYERS,
        "packed_bytes": plan.bytes_after,
        "before_bytes": before,
        "peak_bytes": peak.bytes,
        "after_bytes": after,
        "alone_bytes": resident() - empty,
    }


class Peak:
    """The largest resident size of this process while the block runs, looked at every 2 ms."""

    def __enter__(self) -> Peak:
        self.bytes, self._run = resident(), True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._run = False
        self._thread.join()

    def _watch(self) -> None:
        while self._run:
            self.bytes = max(self.bytes, resident())
            time.sleep(0.002)


def resident() -> int:
    """Return the resident bytes of this process.

    Raises:
        MeasureError: The operating system does not say.
    """
    status = Path("/proc/self/status")
    match = re.search(r"VmRSS:\s+(\d+) kB", status.read_text() if status.exists() else "")
    if not match:
        raise twofour.errors.MeasureError("resident memory is not known", got=sys.platform, wanted="Linux")
    return int(match[1]) * 1024


def trim() -> None:
    """Give freed memory back to the operating system, so that it is not counted as held."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def show(found: dict[str, object], console: Console) -> None:
    """Print what was found beside what is allowed."""
    size = {name: int(str(value)) for name, value in found.items() if name.endswith("_bytes")}
    allowed = size["packed_bytes"] + size["largest_layer_bytes"]
    grown = size["peak_bytes"] - size["before_bytes"]
    console.print(
        f"{found['dtype']}, memory={found['memory']!r}: dense {size['dense_bytes'] / 1e6:.0f} MB, packed "
        f"{size['packed_bytes'] / 1e6:.0f} MB\nwhile compiling: {grown / 1e6:.0f} MB beside the dense weights, packed "
        f"and the largest layer are {allowed / 1e6:.0f} MB ({grown / allowed:.2f}x)\nafterwards, the dense model "
        f"gone: {size['alone_bytes'] / 1e6:.0f} MB, {size['alone_bytes'] / size['packed_bytes'] - 1:+.1%} of packed",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1], sys.argv[2])))
