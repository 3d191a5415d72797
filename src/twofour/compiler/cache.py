"""Times measured on this machine, kept between processes so that a second compile is quick.

One JSON file per machine, kernel set and version, in $TWOFOUR_CACHE, else $XDG_CACHE_HOME/twofour, else
~/.cache/twofour. TWOFOUR_CACHE=off measures anew each time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import torch

from twofour import native
from twofour.errors import MeasureError
from twofour.kernels import rows
from twofour.measure import machine, write_json

logger = logging.getLogger("twofour.compiler")


class Cache:
    """Medians by case; a damaged or unwritable file is reported and ignored, never fatal."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._times: dict[str, dict[str, float]] = {}
        self._passing: dict[str, dict[str, float]] = {}
        self._changed = False
        if path is not None:
            self._times = _read(path)

    @classmethod
    def for_this_machine(cls) -> Cache:
        """Open the cache of this machine, this torch and these kernels."""
        setting = os.environ.get("TWOFOUR_CACHE", "")
        if setting == "off":
            return cls(None)
        try:
            folder = Path(setting or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError as error:  # no home folder
            logger.warning("measured times are not kept: %s; set TWOFOUR_CACHE to a folder", error)
            return cls(None)
        return cls((folder if setting else folder / "twofour") / f"times-{_identity()}.json")

    def key(self, case: str, copies: int) -> str:
        """Name a case with threads of our kernels and of torch's, and copies of the weight rotated over."""
        return f"{case}/{native.threads()}/{torch.get_num_threads()}t/{copies}c/{native.isa()}"

    def get(self, key: str) -> dict[str, float]:
        """Return the seconds of each kernel measured for this case, possibly none."""
        return self._times.get(key) or self._passing.get(key, {})

    def put(self, key: str, seconds: dict[str, float], *, steady: bool = True) -> None:
        """Remember the seconds of each kernel for this case; `save` writes them if they were `steady`."""
        if steady:
            self._times[key] = seconds
            self._changed = True
        else:
            self._passing[key] = seconds

    def save(self) -> None:
        """Write the file if anything is new, keeping what another process has added meanwhile."""
        if self.path is None or not self._changed:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {**_read(self.path), **self._times})
            self._changed = False
        except (OSError, MeasureError) as error:
            logger.warning("the measured times could not be kept in %s: %s", self.path, error)


def _identity() -> str:
    """Hash what a measured time depends on: the machine, torch and its settings, and the kernels as they were built."""
    described = machine()
    extension = native.extension().__file__
    facts = [
        *(described[part] for part in ("cpu", "cpu_identity", "caches", "cores_allowed", "software", "environment")),
        torch.get_float32_matmul_precision(),
        [kernel.name for kernel in rows()],
        hashlib.sha256(Path(extension).read_bytes()).hexdigest() if extension else None,
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
