"""How many steps there is time for: by the processor time of the quickest, which a busy machine does not change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

LOOKS = (3, 6, 12, 24)
"""Steps after which the pace is looked at. The first one may load code, and its neighbours may share a core's caches
with another process; the last look comes before the values are judged for the first time."""


class Pace:
    """The pace of steps that have a budget of seconds, told by the quickest for the size of its batch.

    On a CPU it is the processor time of the thread that steps: its share of each parallel loop and all between them,
    with the backward pass, so what a quiet machine takes in wall time whatever the number of threads. The time of the
    process would count every thread that works or waits in a loop, and those of others. On other devices it is wall
    time: their backward passes run in threads of their own.

    Args:
        device: Where the steps are made.
        sizes: Of each batch, in one unit; steps take time by it.
        seconds: For all steps together.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int], seconds: float) -> None:
        self._clock = time.thread_time if device.type == "cpu" else time.perf_counter
        mean = sum(sizes) / len(sizes)
        self._shares = [size / mean if size else 1.0 for size in sizes]
        self.seconds, self.spent, self.steps, self.least = seconds, 0.0, 0, float("inf")

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Make a step inside, on the batch of a number."""
        begin = self._clock()
        yield
        took = self._clock() - begin
        self.steps, self.spent = self.steps + 1, self.spent + took
        self.least = min(self.least, took / self._shares[index])

    def due(self) -> bool:
        """Whether it is looked at now: sooner, but not after one step, where the time is up already."""
        return self.steps in LOOKS or (self.steps == 2 and self.spent >= self.seconds)

    def fit(self) -> int:
        """Return how many steps of middling size there is time for."""
        return int(self.seconds / max(self.least, 1e-9))
