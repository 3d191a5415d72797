"""Times on the GPU: candidates captured as CUDA graphs, replayed in turn, timed by events; and what the board says.

A graph holds one call on each copy of the weights, so that a replay rotates through memory as a model does and the
processor's launches do not count. What cannot be captured is timed call by call, and the record says so.
"""

from __future__ import annotations

import datetime
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from twofour.errors import MeasureError
from twofour.measure.machine import machine, version_of
from twofour.measure.record import Record, Timing
from twofour.measure.timing import AGAIN, balanced_orders, noise_of

SAMPLE_SECONDS = 2e-3
"""A sample lasts at least this long: events resolve half a microsecond."""

PACKAGES = ("torch", "triton", "nvidia-cusparselt-cu13", "nvidia-cusparselt-cu12", "nvidia-cublas")

_QUERY = "driver_version,vbios_version,power.limit,clocks.max.sm,clocks.max.memory"


@cache
def gpu_facts() -> dict[str, object]:
    """Describe the GPU and the libraries that decide its speed, JSON-ready; what cannot be found is None."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "l2": getattr(properties, "L2_cache_size", None),
        "cuda": torch.version.cuda,
        **dict(zip(_QUERY.split(","), _smi(), strict=False)),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
    }


def _smi() -> list[str]:
    uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", *(["-i", f"GPU-{uuid}"] if uuid else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [part.strip() for part in lines[0].split(",")] if lines else []


class Board:
    """The driver's counters of the current GPU through NVML (the package nvidia-ml-py); without it all are None."""

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            import pynvml  # pyright: ignore[reportMissingImports]

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._nvml = pynvml
        except Exception as error:  # an absent package, driver or counter: a record without them is still one
            self.reason = f"{type(error).__name__}: {error}"

    def joules(self) -> float | None:
        """Return the energy used since the driver was loaded."""
        found = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if found is None else found / 1e3

    def now(self) -> dict[str, object]:
        """Return clocks in MHz, power in watts and temperature in degrees Celsius at this moment."""
        power = self._ask("nvmlDeviceGetPowerUsage")
        return {
            "sm_mhz": self._ask("nvmlDeviceGetClockInfo", 1),
            "memory_mhz": self._ask("nvmlDeviceGetClockInfo", 2),
            "watts": None if power is None else power / 1e3,
            "celsius": self._ask("nvmlDeviceGetTemperature", 0),
        }

    def _ask(self, function: str, *arguments: int) -> Any:
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None


def graphed(calls: Sequence[Callable[[], object]]) -> Callable[[], object] | None:
    """Capture the calls, one after the other, as one CUDA graph and return its replay; None if that cannot be done."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]
    except RuntimeError:  # something in the calls waits for the device
        torch.cuda.synchronize()
        return None
    return lambda kept=kept: graph.replay()


@dataclass
class _Runner:
    """One candidate: what a sample replays and how often."""

    name: str
    calls: Sequence[Callable[[], object]]
    replay: Callable[[], object] | None = None
    repeats: int = 1
    samples: list[float] = field(default_factory=list)

    def prepare(self) -> None:
        try:
            self.replay = graphed(self.calls)
            once = self.seconds(1)
        except Exception as error:
            raise MeasureError(
                f"candidate `{self.name}` raised {type(error).__name__} while it was timed", got=str(error)
            ) from error
        self.repeats = max(1, int(SAMPLE_SECONDS / max(once * len(self.calls), 1e-7)))

    def seconds(self, repeats: int) -> float:
        """Return the seconds of one call over `repeats` rounds through the copies."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            if self.replay is not None:
                self.replay()
            else:
                for call in self.calls:
                    call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / (repeats * len(self.calls))

    def timing(self) -> Timing:
        samples = [max(sample, 1e-9) for sample in self.samples]
        lower, _, upper = statistics.quantiles(samples, n=4, method="inclusive")
        calls = self.repeats * len(self.calls)
        return Timing(statistics.median(samples), lower, upper, min(samples), len(samples), calls)


def device_seconds(calls: Sequence[Callable[[], object]], *, repeats: int = 5) -> float:
    """Return the median seconds of one call on the device, the calls in turn."""
    runner = _Runner("", calls)
    runner.prepare()
    return statistics.median(runner.seconds(runner.repeats) for _ in range(repeats))


def compare_on_gpu(
    candidates: Mapping[str, Callable[[], object] | Sequence[Callable[[], object]]],
    *,
    baseline: str | Sequence[str] | None = None,
    repeats: int = 10,
    seconds: float = 1.0,
    noise: bool = False,
    energy: bool = False,
    meta: Mapping[str, object] | None = None,
) -> Record:
    """Time candidates against each other on the GPU, interleaved as in `compare`.

    Args:
        candidates: Name to a callable, or to several that do the same work on different copies of the weights.
        baseline: As in `compare`.
        repeats: Rounds at most.
        seconds: Wall time after which no further round starts; three are made all the same.
        noise: Also time the fastest baseline a second time (A/A).
        energy: Also run each alone for a quarter of a second and read the driver's counter of energy.
        meta: Facts about the case.

    Returns:
        A record whose clock is "cuda events"; its meta holds the board's counters before and after, joules per call of
        a candidate where the driver counts them, and the names of candidates that could not be captured as graphs.

    Raises:
        MeasureError: There is nothing to time, or a candidate raised (the message carries its name).
    """
    names = (baseline,) if isinstance(baseline, str) else tuple(baseline or ())
    runners = _prepared(candidates)
    if noise and names:
        best = min((r for r in runners if r.name in names), key=lambda r: r.seconds(r.repeats))
        runners.append(_Runner(best.name + AGAIN, best.calls, best.replay, best.repeats))
    board = Board()
    before = board.now()
    _rounds(runners, repeats, seconds)
    timings = {runner.name: runner.timing() for runner in runners}
    copies = max(len(runner.calls) for runner in runners)
    joules = _energy(board, runners) if energy else None
    facts = {"gpu": gpu_facts(), "before": before, "after": board.now(), "joules": joules}
    eager = [runner.name for runner in runners if runner.replay is None]
    return Record(
        timings={name: timing for name, timing in timings.items() if not name.endswith(AGAIN)},
        baseline=names,
        clock="cuda events",
        threads=torch.get_num_threads(),
        weights="cold" if copies > 1 else "hot",
        cold={"copies": copies},
        noise=noise_of(timings),
        meta={**dict(meta or {}), **facts, "not_captured": eager},
        machine=machine(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _prepared(candidates: Mapping[str, Callable[[], object] | Sequence[Callable[[], object]]]) -> list[_Runner]:
    if not candidates:
        raise MeasureError("there is nothing to time", got="no candidates", wanted="a dict of name to callable")
    runners = [_Runner(name, [c] if callable(c) else list(c)) for name, c in candidates.items()]
    for runner in runners:
        runner.prepare()
    return runners


def _rounds(runners: Sequence[_Runner], repeats: int, seconds: float) -> None:
    orders, start = balanced_orders(len(runners)), time.perf_counter()
    for index in range(repeats):
        if index >= 3 and time.perf_counter() - start > seconds:
            return
        for position in orders[index % len(orders)]:
            runner = runners[position]
            runner.samples.append(runner.seconds(runner.repeats))


def _energy(board: Board, runners: Sequence[_Runner], window: float = 0.25) -> dict[str, float] | None:
    """Return joules per call, each candidate run alone for a while: the driver's counter moves every 20 to 100 ms."""
    if board.joules() is None:
        return None
    found = {}
    for runner in runners:
        begin, start, calls = board.joules(), time.perf_counter(), 0
        while time.perf_counter() - start < window:
            runner.seconds(runner.repeats)
            calls += runner.repeats * len(runner.calls)
        end = board.joules()
        if begin is not None and end is not None:
            found[runner.name] = (end - begin) / calls
    return found
