"""How torch's OpenMP threads wait for each other, and when that stops a process: on a machine with too much to do.

A thread that waits spins before it sleeps, for some milliseconds by default (libgomp; 200 in Intel's runtime). Where
other processes have the cores, the thread that it waits for does not run meanwhile, and each of the thousands of small
parallel operations of pruning or measuring takes a turn of the system's scheduler: docs/environment.md has what that
costs. OpenMP reads its variables when torch is imported, so only a program, not a library, can set them.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch

logger = logging.getLogger("twofour.native")

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Of OpenMP runtimes, by which whoever starts a process says how threads wait."""
BUSY = 2.0
"""Runnable threads a core, of which a process that uses all cores is one, beyond which they take each other's time."""


def contended() -> str | None:
    """Say why the threads of this process may wait for each other for long, None where nothing speaks for it."""
    threads = torch.get_num_threads()
    average = getattr(os, "getloadavg", None)  # Windows has none
    if threads == 1 or average is None or any(name in os.environ for name in VARIABLES):
        return None
    cores, load = os.cpu_count() or 1, average()[0]
    if load <= BUSY * cores:
        return None
    return (
        f"{threads} threads on {cores} cores that have {load:.1f} to run already: they wait by spinning, "
        "which may take many times as long as one thread would. Set OMP_NUM_THREADS=1, or OMP_WAIT_POLICY=passive, "
        "before the process starts"
    )


@cache
def warn() -> None:
    """Log once a process that its threads may wait for each other for long, where they may."""
    if (why := contended()) is not None:
        logger.warning("%s", why)
