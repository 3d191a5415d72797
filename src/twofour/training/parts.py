"""Where the time of a training step goes: a clock that the products of attached layers report to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("pack", "forward", "data gradient", "weight gradient")
"""Parts of the attached layers; "pack" is making packed or pruned operands."""

_clocks: list[dict[str, float]] = []


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Collect the seconds of the attached layers' parts meanwhile, by the names in `PARTS`: CPU work, of any thread."""
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
    begin = time.perf_counter()
    try:
        yield
    finally:
        for seconds in _clocks:
            seconds[name] += time.perf_counter() - begin
