"""The only timer: interleaved comparisons, their spread, and the machine they were made on."""

from __future__ import annotations

from twofour.measure.machine import last_level_cache_bytes, machine
from twofour.measure.record import Record, Timing, geometric_mean, load, save, write_json
from twofour.measure.timing import Cold, compare, copies_for_cold

__all__ = [
    "Cold",
    "Record",
    "Timing",
    "compare",
    "copies_for_cold",
    "geometric_mean",
    "last_level_cache_bytes",
    "load",
    "machine",
    "save",
    "write_json",
]
