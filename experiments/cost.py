"""What a step costs: processor time, and the memory that the process holds at most meanwhile."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from pathlib import Path

PROCESS = Path("/proc/self")


class Cost:
    """Time and memory of the block that it is the context of.

    Attributes:
        seconds: Of wall time.
        processor: Seconds of processor time of all threads, which other processes do not lengthen.
        memory: Bytes resident at most in it beyond those at its begin, as Linux counts them (proc(5): VmHWM of
            /proc/self/status, which 5 in /proc/self/clear_refs sets back); None on other systems.
    """

    seconds: float
    processor: float
    memory: int | None = None

    def __enter__(self) -> Cost:
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be taken again without being seen
        self._before = _most(fresh=True)
        self._begin, self._used = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *raised: object) -> None:
        self.seconds, self.processor = time.perf_counter() - self._begin, time.process_time() - self._used
        most = _most()
        self.memory = None if most is None or self._before is None else max(0, most - self._before)


def _most(fresh: bool = False) -> int | None:
    """Return the most bytes held since the last fresh start, or now with one; None where the system does not say."""
    try:
        if fresh:
            (PROCESS / "clear_refs").write_text("5")
        lines = (PROCESS / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
