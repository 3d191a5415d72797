"""The only timer: interleaved comparisons, their spread, and the machine they were made on."""

from twofour.measure.gpu import Board, compare_on_gpu, device_seconds, gpu_facts
from twofour.measure.machine import last_level_cache_bytes, machine, processor, require_threads, software
from twofour.measure.record import Record, Timing, geometric_mean, load, save, without_nan, write_json
from twofour.measure.timing import Cold, compare, copies_for_cold

__all__ = [
    "Board",
    "Cold",
    "Record",
    "Timing",
    "compare",
    "compare_on_gpu",
    "copies_for_cold",
    "device_seconds",
    "geometric_mean",
    "gpu_facts",
    "last_level_cache_bytes",
    "load",
    "machine",
    "processor",
    "require_threads",
    "save",
    "software",
    "without_nan",
    "write_json",
]
