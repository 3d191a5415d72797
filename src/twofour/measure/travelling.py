"""Times that travel with a saved model: each machine that measured it, and what it measured."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from twofour import native
from twofour.measure.machine import processor, software

logger = logging.getLogger("twofour.compiler")

Seconds = Mapping[str, Mapping[str, float]]
"""Case -> kernel -> seconds."""

MOST_MACHINES = 8
"""Machines whose times a file keeps, the latest: more would be history."""

MOST_CASES, MOST_KERNELS, LONGEST_NAME = 4096, 64, 400
"""Cases of one machine, kernels of one case and letters of a name that a file may hold: some ten times what a large
model has."""


@dataclass(frozen=True)
class MachineTimes:
    """What one machine measured of one model.

    Attributes:
        isa: Instruction-set level of its kernels.
        extras: Instruction sets beyond the level that it has.
        cpu: Processor, with family, model and stepping: a hint, and words for the plan.
        software: Versions of torch and twofour.
        date: Day of the latest of its times, ISO 8601.
        seconds: Its times, by case and kernel.
    """

    isa: str
    extras: tuple[str, ...]
    cpu: str
    software: str
    date: str
    seconds: Seconds = field(default_factory=dict, repr=False)

    def instructions(self) -> tuple[object, ...]:
        """Return what must be equal for a kernel to be as fast beside its rivals, as far as names tell."""
        return self.isa, self.extras

    def identity(self) -> tuple[object, ...]:
        """Return what makes it another machine."""
        return *self.instructions(), self.cpu, self.software

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready fields."""
        seconds = {case: dict(times) for case, times in self.seconds.items()}
        return {**self.__dict__, "extras": list(self.extras), "seconds": seconds}


def this_machine(seconds: Seconds | None = None) -> MachineTimes:
    """Describe this machine as it may use its kernels now, with times it measured today."""
    extras = tuple(
        name for name, one in native.instruction_sets().items() if name != one.level and native.supports(name)
    )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return MachineTimes(native.isa(), extras, _processor(), _software(), today, seconds or {})


@cache
def _processor() -> str:
    return "".join(letter for letter in processor() if letter.isprintable())[:LONGEST_NAME]


@cache
def _software() -> str:
    return ", ".join(f"{name} {version}" for name, version in software().items())[:LONGEST_NAME]


def extended(given: Sequence[MachineTimes], seconds: Seconds) -> tuple[MachineTimes, ...]:
    """Return the machines of a file with what this one has measured since, the latest first."""
    if not seconds:
        return tuple(given)
    here = this_machine()
    known = next((machine.seconds for machine in given if machine.identity() == here.identity()), {})
    others = [machine for machine in given if machine.identity() != here.identity()]
    kept = dict(list({**known, **seconds}.items())[-MOST_CASES:])
    return (this_machine(kept), *others)[:MOST_MACHINES]


def read_machines(found: object) -> tuple[MachineTimes, ...]:
    """Read what `to_json` wrote, of a file that nobody vouches for; what is malformed is left out and logged.

    A time only ever decides between kernels that run here and compute the same, so a planted one costs speed alone.
    """
    if found is None:
        return ()
    entries = found[:MOST_MACHINES] if isinstance(found, list) else [found]
    read = [_machine(entry) for entry in entries]
    if wrong := sum(machine is None for machine in read):
        logger.warning("the file's times of %d machines are malformed and not used", wrong)
    return tuple(machine for machine in read if machine is not None)


def _machine(entry: object) -> MachineTimes | None:
    fields = {"isa", "extras", "cpu", "software", "date", "seconds"}
    if not isinstance(entry, dict) or set(entry) != fields:
        return None
    extras, seconds = entry["extras"], entry["seconds"]
    words = [entry["isa"], entry["cpu"], entry["software"], entry["date"]]
    if not isinstance(extras, list) or not all(map(_is_name, (*words, *extras[:MOST_KERNELS]))):
        return None
    if not isinstance(seconds, dict) or len(seconds) > MOST_CASES or len(extras) > MOST_KERNELS:
        return None
    if not all(_is_name(case) and _are_times(times) for case, times in seconds.items()):
        return None
    isa, cpu, software_, date = words
    return MachineTimes(isa, tuple(extras), cpu, software_, date, seconds)


def _is_name(word: object) -> bool:
    return isinstance(word, str) and len(word) <= LONGEST_NAME and word.isprintable()


def _are_times(times: object) -> bool:
    return (
        isinstance(times, dict)
        and 0 < len(times) <= MOST_KERNELS
        and all(_is_name(name) and is_time(seconds) for name, seconds in times.items())
    )


def is_time(seconds: object) -> bool:
    """Tell whether something is a time that a call could take: up to a day."""
    return type(seconds) is float and 0 < seconds < 86_400
