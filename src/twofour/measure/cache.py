"""Times that choices are made by: out of a saved model, kept between processes, or measured now.

What is kept between processes is one JSON file per machine, kernel set and version, in $TWOFOUR_CACHE, else
$XDG_CACHE_HOME/twofour, else ~/.cache/twofour. TWOFOUR_CACHE=off measures anew each time. Times whose order was not
settled when they were taken, on a busy machine, are kept too: the next compile takes them once more, and of each kernel
the lower time counts from then on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from twofour import native
from twofour.errors import MeasureError
from twofour.files import read_json
from twofour.measure.effort import FULL, Effort
from twofour.measure.gpu import gpu_facts
from twofour.measure.machine import machine
from twofour.measure.record import write_json
from twofour.measure.travelling import MachineTimes, extended, is_time, this_machine

logger = logging.getLogger("twofour.compiler")

SETTLED = 0.1
"""Doubt up to which an order counts as settled: beyond, the next compile looks once more."""

MOST_LOOKS = FULL.looks
"""Times a case is measured at most: the second look settles it, so that measuring ends on a busy machine too."""

E = TypeVar("E")

_TIMES = "the measured times"

DIGITS = 4
"""Significant digits of a time that is kept: a file and a process that read it choose alike."""


@dataclass(frozen=True)
class Entry:
    """What is kept of one case.

    Attributes:
        seconds: Seconds of each kernel.
        looks: How often it was measured in full; `MOST_LOOKS` where the order was settled at once, 1 where all looks
            were of less than the full effort.
    """

    seconds: Mapping[str, float]
    looks: int = MOST_LOOKS

    def with_look(self, seconds: Mapping[str, float], doubt: float, effort: Effort) -> Entry:
        """Return it with another look: of each kernel the lower time, which others disturbed least.

        A look of less than the full effort settles nothing, however often it is repeated.
        """
        lower = {name: min(s, self.seconds.get(name, s)) for name, s in seconds.items()}
        if effort != FULL:
            looks = max(self.looks, 1) if seconds.keys() <= self.seconds.keys() else 1
        else:
            looks = MOST_LOOKS if doubt <= SETTLED else min(self.looks + 1, MOST_LOOKS)
        return Entry({**self.seconds, **lower}, looks)


class Cache:
    """Seconds by case and kernel; a damaged or unwritable file is reported and ignored, never fatal.

    Args:
        path: The file; None keeps nothing.
        given: Times out of a saved model; those of a machine with this one's instruction sets are taken.
        fresh: Measure every case once more, whatever the file has.
        effort: How often a case is looked at. What less than the full effort has measured serves compilations of no
            more; a full one looks at it once more.
    """

    def __init__(
        self, path: Path | None, given: Sequence[MachineTimes] = (), fresh: bool = False, effort: Effort = FULL
    ) -> None:
        self.path, self.given, self._fresh, self._effort = path, tuple(given), fresh, effort
        self._new: dict[str, Entry] = {}
        self._used: dict[str, Mapping[str, float]] = {}
        self._origins: dict[str, str] = {}
        self._doubts: dict[str, float] = {}
        self._seen: set[str] = set()
        self._written = 0
        self._measured, self._seconds = 0, 0.0

    @classmethod
    def for_this_machine(
        cls,
        kernels: Sequence[str],
        device: str = "cpu",
        *,
        given: Sequence[MachineTimes] = (),
        fresh: bool = False,
        effort: Effort = FULL,
    ) -> Cache:
        """Open the cache of this machine, this torch and the kernels of these names; of its GPU for "cuda"."""
        folder = cache_folder()
        return cls(
            None if folder is None else folder / f"times-{_identity(kernels, device)}.json", given, fresh, effort
        )

    def key(self, case: str, copies: int = 1) -> str:
        """Name a case with threads of our kernels and of torch's, and copies of the weight rotated over."""
        return f"{case}/{native.threads()}/{torch.get_num_threads()}t/{copies}c/{native.isa()}"

    def times(
        self, key: str, names: Sequence[str], measure: Callable[[], tuple[dict[str, float], float]]
    ) -> dict[str, float]:
        """Return the seconds of each kernel: out of the saved model, from the file, or measured now.

        Args:
            key: From `key`.
            names: Of the kernels.
            measure: Returns the seconds of each, and in how much doubt their order is.
        """
        self._seen.add(key)
        if (known := self._known(key, names)) is None:
            begun = time.perf_counter()
            found, doubt = measure()
            self._seconds += time.perf_counter() - begun
            self.put(key, found, doubt=doubt)
            known = self.get(key)
        return {name: known[name] for name in names}

    def _known(self, key: str, names: Sequence[str]) -> Mapping[str, float] | None:
        """Return the known seconds of all these kernels, None where one is missing or a second look is due."""

        def complete(seconds: Mapping[str, float]) -> bool:
            return all(name in seconds for name in names)

        if key in self._new and complete(self._new[key].seconds):
            return self._new[key].seconds
        here, alike = self._machines
        if here is not None and complete(times := here.seconds.get(key, {})):
            return self._from(here, key, times)
        kept = self._kept.get(key)
        if kept is not None and self.looked_at(key) and complete(kept.seconds):
            self._used[key] = kept.seconds
            return kept.seconds
        found = next((one for one in alike if complete(one.seconds.get(key, {}))), None)
        return None if found is None else self._from(found, key, found.seconds[key])

    def looked_at(self, key: str) -> bool:
        """Tell whether a case was looked at here, or as often as this effort asks in processes before."""
        kept = None if self._fresh else self._kept.get(key)
        return key in self._new or (kept is not None and kept.looks >= self._effort.looks)

    def carries(self, key: str, names: Sequence[str]) -> bool:
        """Tell whether the saved model has the seconds of all these kernels, so that nothing need be measured."""
        return self._known(key, names) is not None and key in self._origins

    def _from(self, source: MachineTimes, key: str, seconds: Mapping[str, float]) -> Mapping[str, float]:
        self._origins[key] = f"measured on {source.cpu or 'an unnamed CPU'}, {source.date}"
        return seconds

    @cached_property
    def _machines(self) -> tuple[MachineTimes | None, tuple[MachineTimes, ...]]:
        """This machine among those given, and the others with its instruction sets, its own processor first."""
        if not self.given or self._fresh:
            return None, ()
        here = this_machine()
        own = next((one for one in self.given if one.identity() == here.identity()), None)
        alike = [one for one in self.given if one.instructions() == here.instructions() and one is not own]
        return own, tuple(sorted(alike, key=lambda one: one.cpu != here.cpu))

    @cached_property
    def _kept(self) -> dict[str, Entry]:
        return read_kept(self.path, _entry, _TIMES)

    def get(self, key: str) -> Mapping[str, float]:
        """Return the seconds of each kernel known for this case, possibly none."""
        entry = self._new.get(key) or self._kept.get(key)
        return {} if entry is None else entry.seconds

    def put(self, key: str, seconds: Mapping[str, float], *, doubt: float = 0.0) -> None:
        """Remember the seconds of each kernel for this case, beside what an earlier look has found.

        Args:
            key: From `key`.
            seconds: Of each kernel.
            doubt: About their order; beyond `SETTLED` the next process looks once more.
        """
        seconds = {name: float(f"{s:.{DIGITS}g}") for name, s in seconds.items()}
        before = self._new.get(key) or (None if self._fresh else self._kept.get(key)) or Entry({}, 0)
        self._new[key] = before.with_look(seconds, doubt, self._effort)
        self._doubts[key] = doubt
        self._used[key] = self._new[key].seconds
        self._measured += 1

    def origin(self, keys: Sequence[str]) -> str:
        """Say which times of a saved model served these cases, "" where none did."""
        found = list(dict.fromkeys(self._origins[key] for key in keys if key in self._origins))
        some = "" if all(key in self._origins for key in keys) else "in part "
        return f"{some}from the file, {' and '.join(found)}" if found else ""

    def machines(self) -> tuple[MachineTimes, ...]:
        """Return the times that a saved model is to carry: those given, and those taken here."""
        return extended(self.given, self._used)

    def save(self) -> None:
        """Write the file if anything is new, keeping what another process has added meanwhile."""
        if self.path is None or len(self._new) == self._written:
            return
        entries = {**read_kept(self.path, _entry, _TIMES), **self._new}
        if write_kept(self.path, {case: vars(entry) for case, entry in entries.items()}, _TIMES):
            self._written = len(self._new)

    def finish(self) -> tuple[str, ...]:
        """Write what is new; return what was measured, and of times in doubt, which a busy machine causes, one line.

        The log has it too.
        """
        self.save()
        found = self._account()
        doubtful = {key: doubt for key, doubt in self._doubts.items() if self._new[key].looks < MOST_LOOKS}
        if doubtful := {key: doubt for key, doubt in doubtful.items() if doubt > SETTLED}:
            for case, doubt in doubtful.items():
                logger.info("%s: the order of its kernels is in doubt by %.0f %%", words_of(case), 100 * doubt)
            worst = max(doubtful, key=doubtful.__getitem__)
            kept = "" if self.path is None else self._looks()
            said = (
                f"{len(doubtful)} of {self._measured} times were taken on a busy machine, the worst in doubt by "
                f"{100 * doubtful[worst]:.0f} % ({words_of(worst)}): they serve now{kept}"
            )
            logger.warning("%s", said)
            return (*found, said)
        return found

    def _account(self) -> tuple[str, ...]:
        """Return how many cases were measured and how many were known."""
        if not self._seen:
            return ()
        known = len(self._seen) - len(self._seen & self._doubts.keys())
        return (f"{self._measured} cases measured here in {self._seconds:.1f} s, {known} known before",)

    def _looks(self) -> str:
        again = "the next compile" if self._effort == FULL else 'the next with effort="full"'
        return f", and {again} takes them once more"


_WORDS = {
    "engines": "the whole model as a graph and layer by layer",
    "decoding": "a call with a cache as a graph and layer by layer",
    "ragged": "batches with padding, packed and padded",
    "attention": "attention in int8 and in bfloat16",
    "fused_block": "a fused block and its operators",
    "conv_chain": "convolutions in a row, as one call and apart",
    "bits_conv": "a convolution of low bits",
    "recurrent": "a recurrent layer",
}
"""What cases are whose keys name them by a digest."""


def words_of(key: str) -> str:
    """Return in words what a key of the cache names: "a product by 384x1536 of 8 tokens"."""
    kind = key.partition("/")[0]
    if found := re.match(r"(joined/)?(\d+x\d+)[^@/]*@(\d+)/", key):
        return f"{'joined products' if found[1] else 'a product'} by {found[2]} of {found[3]} tokens"
    if kind == "conv" and (images := re.search(r"@(\d+x\d+x\d+)", key)):
        return f"a convolution on images of {images[1]}"
    return _WORDS.get(kind, kind)


def _identity(kernels: Sequence[str], device: str) -> str:
    """Hash what a measured time depends on: the machine, torch and its settings, and the kernels as they were built."""
    described = machine()
    extension = native.extension().__file__
    facts = [
        *(described[part] for part in ("cpu", "cpu_identity", "caches", "cores_allowed", "software", "environment")),
        torch.get_float32_matmul_precision(),
        list(kernels),
        hashlib.sha256(Path(extension).read_bytes()).hexdigest() if extension else None,
        *([gpu_facts()] if device == "cuda" else []),
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def _entry(value: Any) -> Entry:
    entry = Entry(value["seconds"], value["looks"])
    if type(entry.looks) is not int or not all(is_time(s) for s in entry.seconds.values()):
        raise ValueError("a time is not a positive number, or a count of looks not a whole one")
    return entry


def cache_folder() -> Path | None:
    """Return where measured times are kept: $TWOFOUR_CACHE, else $XDG_CACHE_HOME/twofour, else ~/.cache/twofour.

    None where TWOFOUR_CACHE is "off" or there is no home folder.
    """
    setting = os.environ.get("TWOFOUR_CACHE", "")
    if setting:
        return None if setting == "off" else Path(setting)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twofour"
    except RuntimeError as error:
        logger.warning("measured times are not kept: %s; set TWOFOUR_CACHE to a folder", error)
        return None


def read_kept(path: Path | None, entry: Callable[[Any], E], what: str) -> dict[str, E]:
    """Return what a file keeps, read by `entry`; one that is damaged is reported and not used, never fatal.

    Args:
        path: The file; None keeps nothing.
        entry: Reads one entry; raises ValueError, TypeError, KeyError or AttributeError where it is none.
        what: Name of the content, in the plural.
    """
    try:
        return {} if path is None else {str(name): entry(value) for name, value in read_json(path).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        logger.warning("%s in %s are not readable and are not used: %s", what, path, error)
        return {}


def write_kept(path: Path, entries: Mapping[str, object], what: str) -> bool:
    """Write such a file whole or not at all; returns whether it could be, and reports where it could not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, entries)
    except (OSError, MeasureError) as error:
        logger.warning("%s could not be kept in %s: %s", what, path, error)
        return False
    return True
