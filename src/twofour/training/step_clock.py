"""Where the time of a training step goes: a clock that the products of attached layers report to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("pack", "forward", "data gradient", "weight gradient")
"""Parts of the attached layers; "pack" is making packed or pruned operands."""

_clocks: list[dict[str, float]] = []


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Collect the seconds of the attached layers' parts meanwhile, by the names in `PARTS`, of any thread.

    On a GPU each part is waited for, so that a step takes longer than without a clock.
    """
    seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    _clocks.append(seconds)
    try:
        yield seconds
    finally:
        _clocks.remove(seconds)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Report what is done inside as one of `PARTS`."""
    if not _clocks:
        yield
        return
    _wait()
    begin = time.perf_counter()
    try:
        yield
    finally:
        _wait()
        for seconds in _clocks:
            seconds[name] += time.perf_counter() - begin


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
