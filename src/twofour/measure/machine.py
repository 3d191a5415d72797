"""What a figure was measured on: processor, caches, memory, versions, libraries, commit."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

from twofour import native
from twofour.errors import MeasureError, TwofourError, integer_from

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_ISA_FLAGS = re.compile(r"^(avx\w*|fma|f16c|amx_\w+|sse4_[12]|gfni|asimd\w*|sve\w*|i8mm|bf16)$")
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "OMP_WAIT_POLICY",
    "OMP_DYNAMIC",
    "GOMP_SPINCOUNT",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "TWOFOUR_ISA",
)


def machine() -> dict[str, object]:
    """Describe this machine and process as a JSON-ready dict.

    Returns:
        Processor model, instruction sets, cache sizes in bytes, cores, memory in bytes, operating system,
        versions of Python and of the packages that decide speed, the BLAS libraries of torch, the git commit
        of twofour when it runs from a checkout (and whether tracked files differ from it), torch's thread
        count and the environment variables that steer threads. What cannot be found is None.
    """
    return {
        **_hardware(),
        "cores_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "software": _software(),
        "commit": _commit(),
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
    }


def processor() -> str:
    """Return the processor's name with its family, model and stepping, where they are known."""
    found = _hardware()
    return " ".join(str(found[part]) for part in ("cpu", "cpu_identity") if found[part])


def software() -> dict[str, str | None]:
    """Return the versions of what computes: torch and twofour."""
    return {name: version_of(name) for name in ("torch", "twofour")}


@functools.cache
def last_level_cache_bytes() -> int | None:
    """Return the size in bytes of the largest cache that the operating system reports, or None."""
    return max(_caches().values(), default=None)


def require_threads(threads: object) -> None:
    """Refuse a number of threads that OpenMP would end the process over, or that only waits for processors.

    Raises:
        MeasureError: It is no whole number from 1 to the machine's processors, or to what torch has if that is more.
    """
    most = max(os.cpu_count() or 1, torch.get_num_threads())
    remedy = "leave it out to use torch's default"
    integer_from(1, "so many threads cannot be measured", MeasureError, remedy, most, threads=threads)


def free_memory_bytes() -> int | None:
    """Return the bytes of memory that can be allocated without swapping, or None where it is not reported."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")))
    return int(match[1]) * 1024 if match else None


@functools.cache
def _caches() -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in sorted(_CACHES.glob("index*")):
        level, kind, size = (_read(entry / name) for name in ("level", "type", "size"))
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if match and kind != "Instruction":
            suffix = "d" if kind == "Data" else ""
            found[f"L{level}{suffix}"] = int(match[1]) * _UNITS.get(match[2], 1)
    return found


@functools.cache
def _hardware() -> dict[str, object]:
    info = _read(Path("/proc/cpuinfo"))
    fields = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", info, re.M))
    flags = fields.get("flags", fields.get("Features", "")).split()
    identity = [f"{key} {fields[key]}" for key in ("cpu family", "model", "stepping") if key in fields]
    memory = re.search(r"MemTotal:\s+(\d+) kB", _read(Path("/proc/meminfo")))
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cpu_identity": ", ".join(identity) or None,
        "isa": sorted(flag for flag in set(flags) if _ISA_FLAGS.match(flag)),
        "caches": _caches(),
        "cores": os.cpu_count(),
        "virtual": "hypervisor" in flags,
        "memory": int(memory[1]) * 1024 if memory else None,
        "os": platform.platform(),
    }


def _software() -> dict[str, str | None]:
    config = torch.__config__.show()
    return {
        "python": sys.version.split()[0],
        **software(),
        "numpy": version_of("numpy"),
        "mkl": _first(r"(oneAPI Math Kernel Library Version \S+|Math Kernel Library Version \S+)", config),
        "onednn": _first(r"MKL-DNN (v\S+)|oneDNN (v\S+)", config),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "native_isa": _native_isa(),
    }


def _native_isa() -> str:
    try:
        return native.isa()
    except TwofourError as error:  # a record of dense code alone is still a record
        return f"none: {error.got}"


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _commit() -> dict[str, object] | None:
    folder = Path(__file__).resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    # An installed copy inside somebody else's repository must not carry that repository's commit.
    if commit is None or not _git(folder, "ls-files", Path(__file__).name):
        return None
    # Records that this run has just written change nothing of what is measured; a page drawn from them neither.
    written = (":(top)", ":(top,exclude)*/records/*", ":(top,exclude)docs/*")
    return {"id": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "--", *written))}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return next((group for group in match.groups() if group), None) if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
