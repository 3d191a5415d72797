"""compare: times candidates against each other, interleaved, in one process."""

from __future__ import annotations

import contextlib
import datetime
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

import torch

from twofour.errors import MeasureError, cut, one_of
from twofour.measure.machine import free_memory_bytes, last_level_cache_bytes, machine, require_threads
from twofour.measure.record import Record, Timing, undisturbed

CLOCKS: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "thread": time.thread_time,
    "process": time.process_time,
}
AGAIN = " (again)"
# A sample of 1 ms is 1000 times the cost of reading the thread clock (about 0.5 us with its system call).
SAMPLE_SECONDS = 1e-3
# Above this, one warm-up call before each sample costs more than the caches it warms can change.
LONG_CALL_SECONDS = 0.05
LONG_SAMPLE_SECONDS = 0.02
# Processor time stands still while a call sleeps or waits, and some systems count it in ticks of 10 ms: calls that the
# clock does not see end a calibration by the wall clock.
LONG_CALIBRATION_SECONDS = 0.1
MIN_ROUNDS = 3
FURTHER = 3
"""Times the rounds and seconds asked for that are spent at most where the fastest candidate is in doubt."""

Candidate: TypeAlias = Callable[[], object] | Sequence[Callable[[], object]]


@dataclass(frozen=True)
class Cold:
    """How many copies a cold comparison rotates over, and whether they exceed the last-level cache.

    Attributes:
        copies: Copies of the weights to make.
        bytes_each: Bytes of one copy.
        bytes_total: Bytes of all copies.
        llc_bytes: Last-level cache as reported by the operating system; a virtual machine may own less of it.
        exceeds_llc: Whether the copies are larger than that cache (None where it is not reported).
    """

    copies: int
    bytes_each: int
    bytes_total: int
    llc_bytes: int | None
    exceeds_llc: bool | None


def copies_for_cold(bytes_each: int, *, cap_bytes: int = 1 << 30, llc_bytes: int | None = None) -> Cold:
    """Say how many copies of a weight make every call find it outside the caches.

    The aim is 200 MB or twice the last-level cache, whichever is larger, capped by `cap_bytes` and by a
    quarter of the free memory; two copies at least.

    Args:
        bytes_each: Bytes of one copy of the largest candidate's weights.
        cap_bytes: Most bytes that one candidate's copies may take.
        llc_bytes: Last-level cache to assume instead of the one reported.

    Raises:
        MeasureError: `bytes_each` is not positive, or two copies do not fit in memory.
    """
    if bytes_each <= 0:
        raise MeasureError("cold copies need a size", got=f"bytes_each={bytes_each}", wanted="bytes_each > 0")
    llc = llc_bytes if llc_bytes is not None else last_level_cache_bytes()
    free = free_memory_bytes()
    if free is not None and 2 * bytes_each > free:
        raise MeasureError(
            "two copies of these weights do not fit in memory",
            got=f"{bytes_each} bytes each, {free} bytes free",
            remedy='measure with weights="hot", or on a machine with more memory',
        )
    limit = cap_bytes if free is None else min(cap_bytes, free // 4)
    wanted = min(max(200 * 10**6, 2 * (llc or 0)), limit)
    copies = max(2, -(-wanted // bytes_each))
    total = copies * bytes_each
    return Cold(copies, bytes_each, total, llc, None if llc is None else total > llc)


@dataclass
class _Runner:
    """One candidate: its copies, how many calls make a sample, the samples so far."""

    name: str
    copies: Sequence[Callable[[], object]]
    clock: Callable[[], float]
    calls: int = 1
    seconds: float = 0.0
    next_copy: int = 0
    samples: list[float] = field(default_factory=list)

    def run(self, calls: int) -> float:
        """Return the seconds per call of the next `calls` calls."""
        count, start = len(self.copies), self.next_copy
        batch = [self.copies[(start + i) % count] for i in range(calls)]
        self.next_copy = (start + calls) % count
        try:
            begin = self.clock()
            for call in batch:
                call()
            return (self.clock() - begin) / calls
        except Exception as error:
            raise MeasureError(
                f"candidate `{self.name}` raised {type(error).__name__} while it was timed", got=str(error)
            ) from error

    def calibrate(self, warmup: int) -> None:
        if warmup:
            self.run(warmup)
        # Within one sample no copy is used twice, or the second use would find it in the cache.
        most = len(self.copies) if len(self.copies) > 1 else 1 << 20
        while True:
            begin = time.perf_counter()
            self.seconds = self.run(self.calls)
            sample, passed = self.seconds * self.calls, time.perf_counter() - begin
            if sample >= SAMPLE_SECONDS or self.calls >= most or 2 * passed > LONG_CALIBRATION_SECONDS:
                self._shorten(sample)
                return
            grow = min(1.2 * SAMPLE_SECONDS / max(sample, 1e-9), LONG_CALIBRATION_SECONDS / max(passed, 1e-9), 100.0)
            self.calls = min(most, max(self.calls + 1, int(self.calls * grow)))

    def sample(self, hot: bool) -> None:
        if hot and self.seconds < LONG_CALL_SECONDS:
            self.run(1)
        self.samples.append(self.run(self.calls))
        self._shorten(self.samples[-1] * self.calls)

    def _shorten(self, sample: float) -> None:
        # On a busy machine a call may become far slower than when it was calibrated; stay near the time box.
        if sample > LONG_SAMPLE_SECONDS:
            self.calls = max(1, int(self.calls * LONG_SAMPLE_SECONDS / (2 * sample)))

    def timing(self) -> Timing:
        # A clock that did not advance over a sample would give a ratio of infinity.
        samples = [max(sample, 1e-10) for sample in self.samples]
        quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        lower, _, upper = quartiles
        return Timing(statistics.median(samples), lower, upper, min(samples), len(samples), self.calls)


def compare(
    candidates: Mapping[str, Candidate],
    *,
    baseline: str | Sequence[str] | None = None,
    repeats: int = 20,
    seconds: float = 2.0,
    warmup: int = 1,
    threads: int | None = None,
    clock: str = "wall",
    weights: str | Cold = "hot",
    noise: bool = False,
    pin: bool = False,
    sure: float | None = None,
    behind: float = math.inf,
    note: str | None = None,
    meta: Mapping[str, object] | None = None,
) -> Record:
    """Time candidates against each other, interleaved, and return medians with their spread.

    In every round each candidate gives one sample; the order follows a balanced Latin square (Williams 1949),
    so that each candidate follows each other one equally often. A sample times enough calls to last 1 ms.
    Garbage collection is off meanwhile.

    Args:
        candidates: Name to a callable without arguments, or to a sequence of callables that do the same work
            on different copies of the weights: consecutive calls use the next copy.
        baseline: Name or names that `Record.ratio` compares with.
        repeats: Rounds at most.
        seconds: Time on `clock` after which no further round starts, so that a busy machine makes as many rounds of
            processor time as a quiet one; three rounds are made all the same (two when they take more than four times
            as long, `repeats` if fewer).
        warmup: Untimed calls of each candidate at the start.
        threads: Threads for torch during the comparison; the current number when None.
        clock: "wall", or "thread": processor time of the calling thread, honest for one thread on a shared
            machine; "process": that of all threads, for candidates that compute on one thread of their own.
        weights: "hot": an untimed call goes before each sample. "cold", or the `Cold` from `copies_for_cold`:
            none does.
        noise: Also time the fastest baseline a second time as its own candidate (A/A).
        pin: Keep the calling thread on one core meanwhile (one thread only).
        sure: Go on, up to three times `repeats` and `seconds`, until `Record.doubt` is at most this; None: never.
        behind: A candidate whose calls take more than this many times the fastest one's while they are counted gives
            one sample.
        note: One line stored in the record.
        meta: Facts about the case, stored in the record; JSON-ready values.

    Raises:
        MeasureError: An argument is impossible, or a candidate raised (the message carries its name).
    """
    runners = _runners(candidates, clock)
    names = (baseline,) if isinstance(baseline, str) else tuple(baseline or ())
    count = torch.get_num_threads() if threads is None else threads
    _refuse(candidates, names, repeats, seconds, count, clock, weights, noise, pin)
    with _conditions(count, pin):
        _calibrate(runners, warmup, names if noise else ())
        _rounds(runners, behind, repeats, seconds, weights == "hot", sure)
    timings = {runner.name: runner.timing() for runner in runners}
    return Record(
        timings={name: timing for name, timing in timings.items() if not name.endswith(AGAIN)},
        baseline=names,
        clock=clock,
        threads=count,
        weights="hot" if weights == "hot" else "cold",
        cold=_rotation(weights, runners),
        noise=noise_of(timings),
        doubt=_doubt([runner for runner in runners if len(runner.samples) > 1]),
        note=note,
        meta=dict(meta or {}),
        machine=machine(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    )


def balanced_orders(count: int) -> list[list[int]]:
    """Return orders of `count` things in which each follows each other one equally often.

    Williams 1949: `count` orders when even, twice as many when odd.
    """
    first = [0]
    for step in range(1, count):
        first.append((step + 1) // 2 if step % 2 else count - step // 2)
    rows = [[(value + shift) % count for value in first] for shift in range(count)]
    return rows + [row[::-1] for row in rows] if count % 2 else rows


def _runners(candidates: Mapping[str, Candidate], clock: str) -> list[_Runner]:
    if not isinstance(candidates, Mapping) or not candidates:
        got = "no candidates" if isinstance(candidates, Mapping) else type(candidates).__name__
        raise MeasureError("there is nothing to time", got=got, wanted="a dict of name to callable")
    one_of("unknown clock", clock, CLOCKS, MeasureError)
    runners = []
    for index, (name, candidate) in enumerate(candidates.items()):
        several = candidate if isinstance(candidate, Iterable) else ()
        copies = [candidate] if callable(candidate) else list(several)
        if not copies or not all(callable(copy) for copy in copies):
            raise MeasureError(
                f"candidate `{name}` cannot be called",
                got=cut(repr(candidate), 120),
                wanted="a callable, or several",
            )
        # Candidates may share copies: one right behind another would find what that one read in the cache.
        first = index * len(copies) // len(candidates)
        runners.append(_Runner(name, copies, CLOCKS[clock], next_copy=first))
    return runners


def _refuse(
    candidates: Mapping[str, Candidate],
    baseline: tuple[str, ...],
    repeats: int,
    seconds: float,
    threads: int,
    clock: str,
    weights: str | Cold,
    noise: bool,
    pin: bool,
) -> None:
    for name in baseline:
        one_of("the baseline is not among the candidates", name, candidates, MeasureError)
    if threads < 1 or repeats < 2 or seconds <= 0:
        raise MeasureError(
            "this cannot be timed",
            got=f"threads={threads}, repeats={repeats}, seconds={seconds}",
            wanted="threads >= 1, repeats >= 2 (for a spread), seconds > 0",
        )
    require_threads(threads)
    if threads > 1 and (clock == "thread" or pin):
        raise MeasureError(
            "the thread clock and pinning see one thread only",
            got=f"clock={clock!r}, pin={pin}, threads={threads}",
            wanted='clock="wall" without pin for several threads',
            remedy="pass threads=1, or drop them",
        )
    if not isinstance(weights, Cold) and weights not in ("hot", "cold"):
        raise MeasureError(
            "unknown state of the weights", got=repr(weights), wanted='"hot", "cold" or copies_for_cold(...)'
        )
    if noise and not baseline:
        raise MeasureError("noise times the baseline twice", got="no baseline", remedy="pass baseline=")


@contextlib.contextmanager
def _conditions(threads: int, pin: bool) -> Iterator[None]:
    before, collecting = torch.get_num_threads(), gc.isenabled()
    cores = os.sched_getaffinity(0) if pin and hasattr(os, "sched_getaffinity") else None
    gc.disable()  # not collected first: that takes a quarter of a second once torch and transformers are imported
    try:
        if threads != before:
            torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, {max(cores)})  # the last core: interrupts mostly land on the first
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
        if threads != before:
            torch.set_num_threads(before)
        if collecting:
            gc.enable()


def _calibrate(runners: list[_Runner], warmup: int, twice: tuple[str, ...]) -> None:
    """Find how many calls make a sample; the fastest of the names in `twice` gets a twin."""
    for runner in runners:
        runner.calibrate(warmup)
    if twice:
        runners.append(_twin(runners, twice))


def _twin(runners: Sequence[_Runner], baseline: tuple[str, ...]) -> _Runner:
    best = min((runner for runner in runners if runner.name in baseline), key=lambda runner: runner.seconds)
    # The twin starts half the copies away: right behind its sibling it would find that copy in the cache.
    away = len(best.copies) // 2
    return _Runner(best.name + AGAIN, best.copies, best.clock, best.calls, best.seconds, best.next_copy + away)


def _rounds(
    runners: Sequence[_Runner], behind: float, repeats: int, seconds: float, hot: bool, sure: float | None
) -> None:
    """Sample in rounds; who took more than `behind` times the fastest one's time is in the first alone."""
    last = min(runner.seconds for runner in runners) * behind
    again = [runner.seconds <= last for runner in runners]
    contenders = [runner for runner, stays in zip(runners, again, strict=True) if stays]
    orders = balanced_orders(len(runners))
    clock = runners[0].clock
    start = clock()
    for index in range(repeats if sure is None else FURTHER * repeats):
        elapsed = clock() - start
        late = elapsed > seconds and (index >= MIN_ROUNDS or (index >= 2 and elapsed > 4 * seconds))
        enough = sure is None or elapsed > FURTHER * seconds
        if (late or index >= repeats) and (enough or _doubt(contenders) <= (sure or 0.0)):
            return
        for position in orders[index % len(orders)]:
            if index == 0 or again[position]:
                runners[position].sample(hot)


def _doubt(runners: Sequence[_Runner]) -> float:
    """Take the fastest by every other round: return how much slower than the fastest it is in the other rounds."""
    halves = [
        {runner.name: undisturbed(runner.samples[begin::2], runner.clock is CLOCKS["wall"]) for runner in runners}
        for begin in (0, 1)
    ]
    return max(
        max(there[min(here, key=here.__getitem__)], 1e-10) / max(min(there.values()), 1e-10) - 1
        for here, there in (halves, halves[::-1])
    )


def _rotation(weights: str | Cold, runners: Sequence[_Runner]) -> dict[str, object] | None:
    """Say over how many copies a cold comparison rotated; None for a hot one."""
    if isinstance(weights, Cold):
        return asdict(weights)
    return None if weights == "hot" else {"copies": max(len(runner.copies) for runner in runners)}


def noise_of(timings: Mapping[str, Timing]) -> float | None:
    """Return how far the medians of a candidate and of its twin are apart, None where none was timed twice."""
    twin = next((name for name in timings if name.endswith(AGAIN)), None)
    return None if twin is None else abs(timings[twin].median / timings[twin.removesuffix(AGAIN)].median - 1)
