"""Which configuration of a GPU row runs a product: searched once per GPU, kernel and shape, checked, kept in a file.

A configuration is trusted when it gives the reference's numbers twice: some of cuSPARSELt's algorithms do not, on some
shapes (pytorch issue 155333). What fails is passed over; the library's own default runs where nothing was searched. The
file is `gpu-<hash>.json` in the cache folder (TWOFOUR_CACHE, docs/environment.md); its name holds the GPU, the
versions of driver and libraries, and the kernels' own sources.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from twofour.kernels.cuda import Configuration
from twofour.measure import gpu_facts
from twofour.measure.cache import cache_folder, read_kept, write_kept
from twofour.measure.distance import distance

logger = logging.getLogger("twofour.kernels")

_WHAT = "the searched configurations"


@dataclass(frozen=True)
class Found:
    """Outcome of one search.

    Attributes:
        configuration: The fastest one whose numbers were right.
        seconds: Of one call, on the device.
        tried: How many were run.
        wrong: How many of them gave other numbers than the reference, or other numbers each time.
        failed: How many the library refused.
    """

    configuration: Configuration
    seconds: float
    tried: int = 0
    wrong: int = 0
    failed: int = 0


def key(kernel: str, rows: int, columns: int, tokens: int) -> str:
    """Name a product of a kernel."""
    return f"{kernel}/{rows}x{columns}@{tokens}"


class Tuning:
    """Configurations by product; a damaged or unwritable file is reported and not used, never fatal."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, Found] = read_kept(path, _entry, _WHAT)

    def configuration(self, name: str) -> Configuration | None:
        """Return what was found for a product, or None: the row's own default serves then."""
        found = self.found.get(name)
        return None if found is None else found.configuration

    def chosen(self, name: str, default: Configuration) -> Configuration:
        """Return what was found for a product, where it says as much as the row's own default, else that."""
        found = self.configuration(name)
        return default if found is None or len(found) != len(default) else found

    def search(
        self,
        name: str,
        candidates: Iterable[Configuration],
        run: Callable[[Configuration], Tensor],
        reference: Tensor,
        seconds: Callable[[Callable[[], object]], float],
        *,
        tolerance: float,
    ) -> Found | None:
        """Run every candidate twice, drop those whose numbers are wrong, and keep the fastest of the others.

        Args:
            name: From `key`.
            candidates: Configurations to try.
            run: Returns the product under a configuration.
            reference: What it should be, in float32 or more.
            seconds: Times one call on the device.
            tolerance: Largest ||product - reference|| / ||reference||.

        Returns:
            What was found, which `configuration` answers from now on; None where no candidate was right.
        """
        best: Found | None = None
        tried = wrong = failed = 0
        for candidate in candidates:
            tried += 1
            try:
                error = max(distance([run(candidate)], [reference]) for _ in range(2))
            except (RuntimeError, ValueError) as problem:  # the library's way of saying that it has no such algorithm
                logger.debug("%s %s: %s", name, candidate, problem)
                failed += 1
                continue
            if not error <= tolerance:
                logger.warning("%s: configuration %s is off by %.1e and is not used", name, candidate, error)
                wrong += 1
                continue
            took = seconds(lambda candidate=candidate: run(candidate))
            if best is None or took < best.seconds:
                best = Found(candidate, took)
        if best is None:
            return None
        self.found[name] = Found(best.configuration, best.seconds, tried, wrong, failed)
        return self.found[name]

    def save(self) -> None:
        """Write the file whole or not at all, keeping what another process has added meanwhile."""
        if self.path is None or not self.found:
            return
        self.found = {**read_kept(self.path, _entry, _WHAT), **self.found}
        write_kept(self.path, {name: asdict(found) for name, found in self.found.items()}, _WHAT)


@cache
def tuned() -> Tuning:
    """Return the configurations of this process, from the file of this GPU."""
    folder = cache_folder()
    return Tuning(None if folder is None else folder / f"gpu-{_identity()}.json")


def _identity() -> str:
    here = Path(__file__).parent
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))).hexdigest()
    facts = {**gpu_facts(), "sources": sources, "torch": torch.__version__}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _entry(entry: object) -> Found:
    fields = cast("dict[str, Any]", entry)
    if not isinstance(entry, dict) or not all(type(n) is int for n in fields["configuration"]):
        raise ValueError("a configuration is no list of whole numbers")
    made: dict[str, Any] = {**fields, "configuration": tuple(fields["configuration"])}
    found = Found(**made)
    if not (isinstance(found.seconds, float) and 0 < found.seconds < math.inf):
        raise ValueError("a time is not a positive number")
    return found
