"""The one chooser: candidates are checked, then raced for their order, which a busy machine can keep.

What was timed is remembered by `cache.Cache`; what is said of a choice is said where its words mean something.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from twofour import native
from twofour.errors import TwofourError
from twofour.measure.distance import distance
from twofour.measure.effort import effort
from twofour.measure.gpu import compare_on_gpu
from twofour.measure.timing import Candidate, compare

SURE = 0.05
"""How much slower than the fastest, judged by half of the rounds, the fastest of the other half may be before more
rounds are made: as much as a further copy of a weight must save (`layouts.WORTH_A_COPY`)."""


def clock() -> str:
    """Return the clock that sees all of a call's work: the calling thread's own, or wall time where others help."""
    return "thread" if native.threads() == torch.get_num_threads() == 1 else "wall"


def fault(candidate: Callable[[], object], reference: Tensor, tolerance: float = math.inf) -> str:
    """Return why a candidate is not trusted: what it raises, or how far off its numbers are; "" where they are right.

    Args:
        candidate: Returns a tensor of as many numbers as the reference.
        reference: What it should be.
        tolerance: Largest `distance`; whatever it is, NaN and infinities are wrong.
    """
    try:
        found = candidate()
        assert isinstance(found, Tensor), type(found)
        error = distance([found.reshape(reference.shape)], [reference])
    except (RuntimeError, ValueError, TwofourError) as problem:  # a library's way of saying that it cannot
        return (str(problem).splitlines() or [type(problem).__name__])[0]
    return "" if error <= tolerance and math.isfinite(error) else f"its numbers are wrong, off by {error:.1e}"


def race(
    calls: Mapping[str, Candidate], *, repeats: int = 7, seconds: float = 0.3, cold: bool = False, gpu: bool = False
) -> tuple[dict[str, float], float]:
    """Time the candidates of one case, interleaved; return seconds by name, and in how much doubt their order is.

    On one thread processor time is taken: what others do meanwhile reaches it through the caches alone, and what slows
    a core evenly slows every candidate of a round. Several threads wait for the slowest of them, so that wall time is
    taken, of which the first quartile counts. Where half of the rounds would choose otherwise, more are made. The doubt
    is what the choice by half of the rounds costs in the other half: 0.1 is a tenth of the time. `measuring` says how
    much is measured.

    Args:
        calls: Name to a callable, or to callables on copies of the weight.
        repeats: Rounds.
        seconds: Time box, on the clock that is read; both are spent three times at most where the order is in doubt.
        cold: The copies are rotated over without warming one up.
        gpu: They run on the GPU, whose own clock times them: nothing else runs there.
    """
    how, weights = effort(), "cold" if cold else "hot"
    rounds, box = min(repeats, how.rounds), seconds * how.box
    if gpu:
        found = compare_on_gpu(calls, repeats=rounds, seconds=box)
        return {name: found.median(name) for name in calls}, 0.0
    spent = {"repeats": rounds, "seconds": box, "sure": SURE if how.sure else None}
    record = compare(calls, weights=weights, clock=clock(), behind=how.behind, **spent)
    return {name: record.undisturbed(name) for name in calls}, record.doubt or 0.0


def milliseconds(calls: Mapping[str, Candidate]) -> dict[str, float]:
    """Return the milliseconds of each of several whole models, raced."""
    seconds, _ = race(calls, repeats=9, seconds=0.5)
    return {name: 1e3 * s for name, s in seconds.items()}
