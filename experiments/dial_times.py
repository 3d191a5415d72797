"""The milliseconds of the models of a dial: compiled first, then all in turns in one process."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import dial as dials
import twofour
from dial import Dial
from records import Clocked, Turned, version
from tasks import Task
from twofour import measure
from twofour.compiler.plan import Plan
from twofour.kernels.base import Row
from twofour.kernels.table import find

ROUNDS, SECONDS = 25, 20.0


def compiled(dial: Dial, task: Task, fresh: Callable[[], nn.Module], row: Turned, effort: str = "full") -> nn.Module:
    """Return the compiled model of a row; the times that its kernels are chosen by are kept between processes."""
    example = dial.example(task)
    return twofour.compile(dials.again(task, fresh, row), example, tokens=(1,), progress=False, effort=effort)


def timed(dial: Dial, task: Task, fresh: Callable[[], nn.Module], rows: Sequence[Turned]) -> list[Clocked]:
    """Time the compiled models of all rows against each other, interleaved, on one thread.

    They are compiled with little effort: `compiled` with the full one, called before, has kept times of their kernels,
    and those serve. The clock is the thread's processor time, which other processes disturb in the caches alone; a call
    packs its own activations, and finds its weights where the call before it left them.
    """
    models = {row.key: compiled(dial, task, fresh, row, "quick") for row in rows}
    inputs = dial.example(task)
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    calls = {key: lambda model=model: model(*arguments) for key, model in models.items()}
    with torch.inference_mode():
        found = measure.compare(calls, repeats=ROUNDS, seconds=SECONDS, threads=1, clock="thread")
    return [_row(key, found, models[key]) for key in calls]


def _row(key: str, found: measure.Record, model: Any) -> Clocked:
    timing = found.timing(key)
    ms, lower, upper = (1e3 * seconds for seconds in (timing.median, timing.lower, timing.upper))
    return Clocked(key, 0, ms, lower, upper, timing.samples, found.load_average, version(), _operations(model.plan))


def _operations(plan: Plan) -> dict[str, int]:
    """Count the layers of a plan by the operation that runs them, those that a product of several holds once."""
    within = {name for layer in plan.layers for name in layer.parts}
    kernels = [layer.kernel for layer in plan.layers if layer.name not in within]
    counted = collections.Counter("torch" if name == "torch" else find(name, Row).operation for name in kernels)
    return dict(sorted(counted.items()))
