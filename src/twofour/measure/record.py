"""Record: what a comparison found, with the machine and the conditions; written and read as JSON."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from twofour.errors import MeasureError, cut, one_of
from twofour.files import LARGEST_LIST, read_json, replacing

FORMAT = "twofour-records"
VERSION = 1


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one candidate, over its samples.

    Attributes:
        median: Median over the samples.
        lower: First quartile.
        upper: Third quartile.
        minimum: Fastest sample.
        samples: Number of samples.
        calls: Calls timed together in one sample.
    """

    median: float
    lower: float
    upper: float
    minimum: float
    samples: int
    calls: int

    @property
    def spread(self) -> float:
        """Interquartile range over the median: 0.05 means that half of the samples lie within 5 %."""
        return (self.upper - self.lower) / self.median


def undisturbed(samples: Sequence[float], wall: bool) -> float:
    """Return what a call takes where other processes disturb it least.

    They only add to wall time, and to most samples of several threads, of which the slowest counts: the first quartile.
    Processor time does not see them but in the caches: the median.
    """
    if len(samples) < 2:
        return samples[0]
    lower, median, _ = statistics.quantiles(samples, n=4, method="inclusive")
    return lower if wall else median


@dataclass(frozen=True)
class Record:
    """Result of one comparison.

    Attributes:
        timings: Candidate name to its timing, in the order given.
        baseline: Names of the candidates that the others are compared with.
        clock: "wall", "thread" for the processor time of the calling thread, or "process" for that of all threads.
        threads: Threads torch was allowed during the comparison.
        weights: "hot" (each call on the same memory) or "cold" (each call on the next copy).
        cold: Copies, bytes and last-level cache of a cold comparison.
        noise: Relative difference of the baseline timed twice (A/A), when asked for.
        note: One line for the reader.
        meta: Facts about the case: shape, dtype, tokens.
        machine: Output of `machine()`.
        created: UTC time, ISO 8601.
        doubt: How much slower than the fastest, in one half of the rounds, the candidate is that the other half calls
            the fastest; the worse of both ways round. 0.0 means that the choice does not depend on the rounds.
        load_average: Processes that wanted to run in the last minute, this one included; None where not reported.
    """

    timings: Mapping[str, Timing]
    baseline: tuple[str, ...] = ()
    clock: str = "wall"
    threads: int = 1
    weights: str = "hot"
    cold: Mapping[str, object] | None = None
    noise: float | None = None
    note: str | None = None
    meta: Mapping[str, object] = field(default_factory=dict)
    machine: Mapping[str, object] = field(default_factory=dict)
    created: str = ""
    doubt: float | None = None
    load_average: float | None = None

    def timing(self, name: str) -> Timing:
        """Return the timing of one candidate.

        Raises:
            MeasureError: No candidate has that name.
        """
        one_of("no such candidate in this record", name, self.timings, MeasureError)
        return self.timings[name]

    def median(self, name: str) -> float:
        """Return the median seconds per call of a candidate."""
        return self.timing(name).median

    def undisturbed(self, name: str) -> float:
        """Return the seconds per call of a candidate as other processes change them least; see `undisturbed`."""
        timing = self.timing(name)
        return timing.lower if self.clock == "wall" else timing.median

    def spread(self, name: str) -> float:
        """Return the interquartile range of a candidate over its median."""
        return self.timing(name).spread

    def fastest(self, names: Iterable[str] | None = None) -> str:
        """Return the name with the smallest median, among `names` or all candidates."""
        chosen = list(self.timings if names is None else names)
        if not chosen:
            raise MeasureError("the fastest of no candidates was asked for", got="an empty list of names")
        return min(chosen, key=self.median)

    def ratio(self, ours: str, *, against: str | Sequence[str] | None = None) -> float:
        """Return the best baseline median over the median of `ours`: above 1 means that `ours` is faster.

        Args:
            ours: Candidate name.
            against: Names to compare with instead of the record's baseline.

        Raises:
            MeasureError: The record has no baseline and none is given, or a name is unknown.
        """
        names = self.baseline if against is None else (against,) if isinstance(against, str) else tuple(against)
        if not names:
            raise MeasureError(
                "this record has no baseline to compare with",
                got=f"candidates {', '.join(self.timings)}",
                remedy="pass baseline= to compare(), or against= to ratio()",
            )
        return self.median(self.fastest(names)) / self.median(ours)

    def to_dict(self) -> dict[str, object]:
        """Return the record as JSON-ready values."""
        return {**asdict(self), "baseline": list(self.baseline)}

    @classmethod
    def from_dict(cls, values: object) -> Record:
        """Build a record from `to_dict` output, checking every field.

        Raises:
            MeasureError: A field is missing, unknown or has an impossible value.
        """
        fields = _checked(values, cls, "record")
        timings = fields["timings"]
        if not isinstance(timings, Mapping) or not timings:
            raise _malformed("`timings` is not a filled object", timings)
        fields["timings"] = {str(name): _timing(name, value) for name, value in timings.items()}
        fields["baseline"] = tuple(fields.get("baseline") or ())
        for name in fields["baseline"]:
            if name not in fields["timings"]:
                raise _malformed(f"baseline `{name}` has no timing", list(fields["timings"]))
        kinds = {"meta": Mapping, "machine": Mapping, "threads": int, "clock": str, "weights": str}
        for name, kind in kinds.items():
            if name in fields and not isinstance(fields[name], kind):
                raise _malformed(f"`{name}` has the wrong type", fields[name])
        return cls(**fields)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write this record alone to a JSON file; see `save`."""
        return save([self], path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Record:
        """Read a file that holds exactly one record.

        Raises:
            MeasureError: The file cannot be read or holds another number of records.
        """
        records = load(path)
        if len(records) != 1:
            got = f"{len(records)} records"
            raise MeasureError(f"{path} does not hold one record", got=got, remedy="use measure.load(path)")
        return records[0]


def save(records: Sequence[Record], path: str | os.PathLike[str]) -> Path:
    """Write records to a JSON file atomically; a machine that they share is written once.

    Raises:
        MeasureError: There is nothing to write, or a value of `meta` cannot be written as JSON.
    """
    if not records:
        raise MeasureError("there is no record to save", got="an empty list", wanted="at least one Record")
    bodies = [record.to_dict() for record in records]
    content: dict[str, object] = {"format": FORMAT, "version": VERSION, "records": bodies}
    if all(body["machine"] == bodies[0]["machine"] for body in bodies):
        content["machine"] = bodies[0]["machine"]
        for body in bodies:
            del body["machine"]
    return write_json(path, content)


def load(path: str | os.PathLike[str]) -> list[Record]:
    """Read the records of a JSON file.

    Raises:
        MeasureError: The file is missing, truncated, of another format or version, or a record is malformed.
    """
    try:
        content = read_json(path, LARGEST_LIST)
    except (OSError, ValueError) as error:
        raise MeasureError(f"{path} cannot be read as records", got=f"{type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
        raise MeasureError(
            f"{path} is not a file of records",
            got=repr(
                {key: content.get(key) for key in ("format", "version")} if isinstance(content, dict) else content
            ),
            wanted=f"format {FORMAT!r}, version {VERSION}",
        )
    bodies = content.get("records")
    if not isinstance(bodies, list) or not bodies:
        raise _malformed("`records` is not a filled list", bodies)
    shared = {"machine": content["machine"]} if "machine" in content else {}
    return [Record.from_dict(shared | body if isinstance(body, dict) else body) for body in bodies]


def write_json(path: str | os.PathLike[str], content: object) -> Path:
    """Write JSON under a temporary name in the same folder, then rename it.

    Raises:
        MeasureError: A value cannot be written as JSON, or the folder cannot be written to.
    """
    target = Path(path)
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MeasureError(f"{target} cannot be written as JSON", got=str(error)) from error
    try:
        with replacing(target) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise MeasureError(f"{target} cannot be written", got=str(error)) from error
    return target


def without_nan(content: Any) -> Any:
    """Return JSON-ready values with NaN and infinities as text, since JSON has no numbers for them."""
    if isinstance(content, dict):
        return {key: without_nan(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [without_nan(value) for value in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean of positive ratios.

    Raises:
        MeasureError: There is no ratio, or one is not positive.
    """
    values = list(ratios)
    if not values or min(values) <= 0:
        raise MeasureError("a geometric mean needs positive ratios", got=repr(values))
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _timing(name: object, value: object) -> Timing:
    fields = _checked(value, Timing, f"timing `{name}`")
    for key, number in fields.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise _malformed(f"timing `{name}`: `{key}` is not a positive number", number)
    timing = Timing(**fields)
    if not timing.minimum <= timing.lower <= timing.median <= timing.upper:
        raise _malformed(f"timing `{name}` is not ordered", timing)
    return timing


def _checked(values: object, cls: type[Record] | type[Timing], what: str) -> dict:
    if not isinstance(values, Mapping):
        raise _malformed(f"{what} is not an object", values)
    known = cls.__dataclass_fields__
    required = set(known) if cls is Timing else {"timings"}
    if unknown := set(values) - set(known):
        raise _malformed(f"{what} has unknown fields", sorted(map(str, unknown)))
    if missing := required - set(values):
        raise _malformed(f"{what} lacks fields", sorted(missing))
    return dict(values)


def _malformed(what: str, got: object) -> MeasureError:
    return MeasureError(f"malformed record: {what}", got=cut(repr(got), 200), wanted="a record written by measure.save")
