"""Candidates: calls that are built one by one, held against the answer they must give, and timed side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from twofour import measure
from twofour.engines.runtimes import NotBuilt
from twofour.errors import TwofourError
from twofour.measure import Record

LARGEST_ERROR = {"float32": 1e-3, "bfloat16": 0.1}
"""Relative to torch in float32, in norm; int8 and int4 differ by what their quantisation costs, which is recorded."""


@dataclass
class Candidates:
    """What is to be timed side by side, while it is built.

    Attributes:
        calls: Candidate -> its call.
        missing: Candidate -> why it is not among them.
        errors: Candidate -> how far its answer is from the one that it must give, in norm, relative to that.
    """

    calls: dict[str, Callable[[], Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, build: Callable[[], Callable[[], Any]], reference: np.ndarray, dtype: str) -> None:
        """Build a candidate and compare its answer; a failure becomes a reason.

        Args:
            name: Of the candidate.
            build: Returns its call.
            reference: What the call must answer.
            dtype: Its computing type, which says how far it may be away.
        """
        try:
            call = build()
            error = _distance(call(), reference)
        except ImportError as error:
            self.missing[name] = f'{reason_of(error)}; pip install "twofour[peers]" brings it'
            return
        except (NotBuilt, TwofourError) as error:
            self.missing[name] = reason_of(error)
            return
        except Exception as error:  # an engine's own failure is a finding about the engine, not an end of the run
            self.missing[name] = f"{type(error).__name__}: {reason_of(error)}"
            return
        if error > LARGEST_ERROR.get(dtype, float("inf")) or error != error:
            self.missing[name] = f"wrong: relative error {error:.1e}"
            return
        self.calls[name], self.errors[name] = call, error


def compare(
    calls: Mapping[str, Callable[[], Any]],
    baseline: Sequence[str],
    threads: int,
    seconds: float,
    meta: Mapping[str, object],
) -> Record:
    """Time whole models side by side.

    On one thread that is the processor time of this thread, pinned to a core, where every candidate computes on it.

    Args:
        calls: Candidate -> its call.
        baseline: Those that the others are compared with; one of them is timed twice (A/A).
        threads: Threads of torch.
        seconds: Time box.
        meta: Facts that the record holds.
    """
    alone = threads == 1 and all(_on_this_thread(call) for call in calls.values())
    return measure.compare(
        calls,
        baseline=tuple(baseline),
        seconds=seconds,
        repeats=40,
        threads=threads,
        clock="thread" if alone else "wall",
        pin=threads == 1,
        noise=True,
        meta=meta,
    )


def _on_this_thread(call: Callable[[], Any]) -> bool:
    """Whether a runtime computes on the calling thread, so that this thread's clock sees all of it."""
    call()
    thread, process = time.thread_time(), time.process_time()
    call()
    return time.thread_time() - thread >= 0.9 * (time.process_time() - process)


def values_of(answer: Any) -> np.ndarray:
    """Return an answer as an array of float32."""
    return answer.float().numpy() if isinstance(answer, torch.Tensor) else np.array(answer, dtype=np.float32)


def _distance(answer: Any, reference: np.ndarray) -> float:
    found = values_of(answer)
    if found.shape != reference.shape:
        return float("nan")
    size = np.linalg.norm(reference.ravel()) or 1.0  # of an answer that is zero throughout, the distance itself
    return float(np.linalg.norm((found - reference).ravel()) / size)


def reason_of(error: Exception) -> str:
    """Return an error's first lines as one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] or type(error).__name__
