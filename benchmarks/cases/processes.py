"""A cell measured in several fresh processes.

In which sets of the caches the pages of a process fall is chance, and decides some cells by tens of per cent.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from twofour.errors import MeasureError
from twofour.measure import Record, Timing

BENCHMARKS = Path(__file__).resolve().parent.parent
MEDIANS = "medians"
"""Where a joined record's meta holds the seconds of every process, by candidate."""


def measured(case: str, settings: Mapping[str, object], count: int) -> Record:
    """Measure a cell in `count` processes, one after the other, and join what they find.

    Args:
        case: Module of cases whose `main` prints the record of the settings, JSON that it is given.
        settings: JSON-ready values.
        count: Processes.

    Raises:
        MeasureError: A process failed.
    """
    return joined([_child(case, settings) for _ in range(count)])


def joined(records: Sequence[Record]) -> Record:
    """Return the first of one cell's records with medians and quartiles of all their medians, which its meta lists."""
    found = {name: [record.median(name) for record in records] for name in records[0].timings}
    noises = [record.noise for record in records if record.noise is not None]
    loads = [record.load_average for record in records if record.load_average is not None]
    return dataclasses.replace(
        records[0],
        timings={name: _joined([record.timings[name] for record in records]) for name in found},
        noise=statistics.median(noises) if noises else None,
        doubt=None,
        meta={**records[0].meta, MEDIANS: found},
        load_average=max(loads) if loads else None,
    )


def ratios(record: Record, ours: str, peer: str) -> list[float]:
    """Return how many times faster ours was in each process of a joined record, rising; one number of any other."""
    medians = record.meta.get(MEDIANS)
    if not isinstance(medians, Mapping):
        return [record.median(peer) / record.median(ours)]
    return sorted(theirs / own for theirs, own in zip(medians[peer], medians[ours], strict=True))


def _joined(timings: Sequence[Timing]) -> Timing:
    medians = [timing.median for timing in timings]
    lower, middle, upper = statistics.quantiles(medians, n=4, method="inclusive") if len(medians) > 1 else medians * 3
    fastest, samples = min(timing.minimum for timing in timings), sum(timing.samples for timing in timings)
    return Timing(middle, lower, upper, fastest, samples, timings[0].calls)


def _child(case: str, settings: Mapping[str, object]) -> Record:
    command = [sys.executable, "-m", f"cases.{case}", json.dumps(settings)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise MeasureError("a process that measures a cell failed", got=done.stderr[-400:])
    return Record.from_dict(json.loads(done.stdout.splitlines()[-1]))
