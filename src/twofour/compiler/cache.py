"""Times measured on this machine, kept between processes so that a second compile is quick.

One JSON file per machine, kernel set and version, in $TWOFOUR_CACHE, else $XDG_CACHE_HOME/twofour, else
~/.cache/twofour. TWOFOUR_CACHE=off measures anew each time.

What slows a machine evenly (a busy sibling core, a throttled clock) spreads no times. A small product that is timed
beside every case, the anchor, shows it: times are kept with their anchor, while that is near the best one ever seen.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from twofour import native
from twofour.errors import MeasureError
from twofour.files import cache_folder
from twofour.kernels import rows
from twofour.measure import compare, gpu_facts, machine, write_json

logger = logging.getLogger("twofour.compiler")

ANCHOR = "anchor"
"""Stands among the kernels of a case for the fixed product that was timed beside it."""

ANCHOR_SIZE = 128
"""Rows and columns of both factors of the anchor: 4 MFLOP, some 40 microseconds on one core, in its own caches."""

SLOWED = 1.5
"""Anchor over best known one from which times are not kept: clocks alone differ by a third between idle and busy."""


class Cache:
    """Medians by case; a damaged or unwritable file is reported and ignored, never fatal."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._times: dict[str, dict[str, float]] = {}
        self._passing: dict[str, dict[str, float]] = {}
        self._changed = False
        self._last: float | None = None
        if path is not None:
            self._times = _read(path)

    @classmethod
    def for_this_machine(cls, device: str = "cpu") -> Cache:
        """Open the cache of this machine, this torch and these kernels; of its GPU for "cuda"."""
        folder = cache_folder()
        return cls(None if folder is None else folder / f"times-{_identity(device)}.json")

    def key(self, case: str, copies: int) -> str:
        """Name a case with threads of our kernels and of torch's, and copies of the weight rotated over."""
        return f"{case}/{native.threads()}/{torch.get_num_threads()}t/{copies}c/{native.isa()}"

    def times(
        self, key: str, names: Sequence[str], measure: Callable[[], tuple[dict[str, float], bool]]
    ) -> dict[str, float]:
        """Return the seconds of each kernel, from the cache where it has them all.

        Args:
            key: From `key`.
            names: Of the kernels.
            measure: Returns the seconds of each, and whether they were steady; times that were not serve this process
                alone, as do those taken while the machine was slow.
        """
        known = self.get(key)
        if not all(name in known for name in names):
            before = self._anchor() if self._last is None else self._last
            known, steady = measure()
            self.put(key, known, steady=steady, anchor=max(before, self._anchor()) if steady else before)
        return {name: known[name] for name in names}

    def get(self, key: str) -> dict[str, float]:
        """Return the seconds of each kernel measured for this case, possibly none."""
        found = self._times.get(key, {})
        if found.get(ANCHOR, 0.0) > SLOWED * self._best():
            logger.info("%s: its times were taken while the machine was slow; it is measured again", key)
            found = {}
        found = found or self._passing.get(key, {})
        return {name: seconds for name, seconds in found.items() if name != ANCHOR}

    def put(self, key: str, seconds: dict[str, float], *, steady: bool = True, anchor: float = 0.0) -> None:
        """Remember the seconds of each kernel for this case.

        Args:
            key: From `key`.
            seconds: Of each kernel.
            steady: Whether they may be kept; else they serve until the process ends.
            anchor: Seconds of the anchor, the slower one of those before and after; 0: not timed.
        """
        self._best(anchor)
        if steady and anchor > SLOWED * self._best():
            logger.warning(
                "%s: the machine is %.1f times slower than it was at best; these times serve now and are not kept",
                *(key, anchor / self._best()),
            )
            steady = False
        if steady:
            self._times[key] = {**seconds, ANCHOR: anchor} if anchor else seconds
            self._changed = True
        else:
            self._passing[key] = seconds

    def _best(self, new: float = 0.0) -> float:
        """Return the best known time of the anchor, with a new one unless that is 0."""
        best = self._times.get(_anchor_key(), {}).get(ANCHOR, math.inf)
        if 0 < new < best:
            self._times[_anchor_key()] = {ANCHOR: new}
            return new
        return best

    def _anchor(self) -> float:
        """Time the anchor, unless no times are kept anyway."""
        self._last = anchor_seconds() if self.path is not None else 0.0
        self._best(self._last)
        return self._last

    def save(self) -> None:
        """Write the file if anything is new, keeping what another process has added meanwhile."""
        if self.path is None or not self._changed:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            others = _read(self.path)
            anchors = {
                key: min(others[key], self._times[key], key=lambda times: times.get(ANCHOR, math.inf))
                for key in others.keys() & self._times.keys()
                if key.startswith(f"{ANCHOR}/")
            }
            write_json(self.path, {**others, **self._times, **anchors})
            self._changed = False
        except (OSError, MeasureError) as error:
            logger.warning("the measured times could not be kept in %s: %s", self.path, error)


def _anchor_key() -> str:
    return f"{ANCHOR}/{native.threads()}/{torch.get_num_threads()}t"


def anchor_seconds() -> float:
    """Return the median seconds of a dense product that nothing but the speed of the machine changes."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(ANCHOR_SIZE, ANCHOR_SIZE, generator=generator, dtype=torch.float32) for _ in range(2))
    clock = "thread" if native.threads() == 1 else "wall"
    with torch.inference_mode():
        return compare({ANCHOR: [lambda: a @ b]}, repeats=5, seconds=0.05, weights="hot", clock=clock).median(ANCHOR)


def _identity(device: str = "cpu") -> str:
    """Hash what a measured time depends on: the machine, torch and its settings, and the kernels as they were built."""
    described = machine()
    extension = native.extension().__file__
    facts = [
        *(described[part] for part in ("cpu", "cpu_identity", "caches", "cores_allowed", "software", "environment")),
        torch.get_float32_matmul_precision(),
        [kernel.name for kernel in rows()],
        hashlib.sha256(Path(extension).read_bytes()).hexdigest() if extension else None,
        *([gpu_facts()] if device == "cuda" else []),
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(s, float) and s > 0 for times in found.values() for s in times.values()):
            raise ValueError("a time is not a positive number")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        logger.warning("the cache of measured times %s is not readable and is not used: %s", path, error)
        return {}
    return found
