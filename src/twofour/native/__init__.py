"""The compiled extension: which instruction sets and threads its kernels may use here."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch

from twofour.errors import KernelError

logger = logging.getLogger("twofour.native")

_COMPILED = (".cc", ".h", ".inc", ".def", ".map")


@cache
def extension() -> ModuleType:
    """Import the compiled extension once, and let its kernels run on torch's threads.

    Raises:
        KernelError: The extension is missing or does not load in this environment; later, where a function is asked for
            that it does not have.
    """
    try:
        _ext = import_module("twofour.native._ext")
    except ImportError as error:
        raise KernelError(
            "the native extension of twofour does not load",
            got=str(error),
            wanted="twofour/native/_ext built for this system, and the package nanobind-backend beside it",
            remedy="`pip install --force-reinstall --no-deps twofour nanobind-backend`, or `make build` in a checkout",
        ) from error
    if Path(__file__).with_name("bindings.cc").exists():  # a checkout: what is installed otherwise has no sources
        tell_of_newer_sources(Path(__file__).parents[1], Path(str(_ext.__file__)))
    _ext.__getattr__ = _older  # asked for what the module does not have (PEP 562)
    next(source for source in thread_sources() if _ext.use_threads(source, torch._C.__file__))
    return _ext


def tell_of_newer_sources(folder: Path, library: Path) -> None:
    """Warn where native sources in a folder changed since a library was put where it is.

    Its functions and rows may be others than the Python side asks for, and errors then speak of arguments or
    instruction sets.
    """
    put = library.parent.stat().st_mtime  # a build writes there; the library's own time stays where nothing is linked
    newer = sorted(path for path, changed in _sources(str(folder)) if changed > put)
    if newer:
        more = f" and {len(newer) - 1} more" if newer[1:] else ""
        logger.warning(
            "the compiled part is older than its sources, so that calls of it may fail or mislead: %s was built before "
            "%s%s changed; `make build` builds it from these",
            library,
            os.path.relpath(newer[0], folder),
            more,
        )


def _sources(folder: str) -> Iterator[tuple[str, float]]:
    """Yield native sources in a folder and when they changed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _sources(entry.path)
            elif entry.name.endswith(_COMPILED):
                yield entry.path, entry.stat().st_mtime


def _older(name: str) -> NoReturn:
    """Say that the Python side asks for what the extension does not have, as after an update without a build."""
    if name.startswith("_"):  # what tools look for in any module
        raise AttributeError(name)
    raise KernelError(
        "the compiled part is older than the sources",
        got=f"{import_module('twofour.native._ext').__file__} without {name}",
        wanted="one built from these sources",
        remedy="`make build` in a checkout, or `pip install` again",
    )


@dataclass(frozen=True)
class InstructionSet:
    """One row of isa.def.

    Attributes:
        name: As rows of the kernel tables give it.
        level: What its rows are ranked by: its own name, or that of the set which it extends on some CPUs.
        parents: Names of the sets it contains.
        measured: Whether the speed of its rows was measured, or only their results checked.
    """

    name: str
    level: str
    parents: tuple[str, ...]
    measured: bool = True


@cache
def instruction_sets() -> dict[str, InstructionSet]:
    """Return every instruction set of this architecture that there are kernels for, by name, parents first."""
    return {
        name: InstructionSet(name, level, tuple(parents.split()), measured)
        for name, level, parents, measured in extension().instruction_sets()
    }


def isa_levels() -> tuple[str, ...]:
    """Return the levels, slower ones first: the sets that rows are ranked by; every other set extends one of them."""
    return tuple(one.name for one in instruction_sets().values() if one.name == one.level)


@cache
def _contained(name: str) -> frozenset[str]:
    """Return the names of all sets that a set contains, itself among them."""
    return frozenset({name}).union(*map(_contained, instruction_sets()[name].parents))


@cache
def _within(cap: str) -> frozenset[str]:
    """Return the names of the sets that TWOFOUR_ISA=`cap` allows.

    A level allows what it contains and all that extends those levels; a set that is no level what it contains alone.

    Raises:
        KernelError: There is no such set.
    """
    sets = instruction_sets()
    if not cap:
        return frozenset(sets)
    if cap not in sets:
        raise KernelError(
            "the environment variable TWOFOUR_ISA names no instruction set",
            got=f"TWOFOUR_ISA={cap!r}",
            wanted=f"one of {', '.join(sets)}",
            remedy="unset TWOFOUR_ISA to use everything this CPU has",
        )
    contained = _contained(cap)
    if sets[cap].level != cap:
        return contained
    levels = {sets[each].level for each in contained}
    return frozenset(name for name, one in sets.items() if one.level in levels)


@cache
def extensions(name: str) -> frozenset[str]:
    """Return the sets of the same level that contain a set which is no level, without itself; of other names none."""
    sets = instruction_sets()
    if name not in sets or sets[name].level == name:
        return frozenset()
    within = (each for each in sets if sets[each].level == sets[name].level and each != name)
    return frozenset(each for each in within if name in _contained(each))


def isa() -> str:
    """Return the level kernels may use: the highest that the CPU has and TWOFOUR_ISA, where it is set, allows.

    Raises:
        KernelError: TWOFOUR_ISA names no instruction set.
    """
    return _allowed(os.environ.get("TWOFOUR_ISA", ""))[-1]


def isa_text() -> str:
    """Return `isa` in words, with the extensions kernels may use where these are not all: "avx512 with avx512_vnni".

    Raises:
        KernelError: TWOFOUR_ISA names no instruction set.
    """
    top = isa()
    extending = [name for name, one in instruction_sets().items() if one.level == top and name != top]
    usable = [name for name in extending if supports(name)]
    if len(usable) == len(extending):
        return top
    return f"{top} with {', '.join(usable)}" if usable else f"{top} alone"


@cache
def _allowed(cap: str) -> tuple[str, ...]:
    """Return the levels that the CPU has and TWOFOUR_ISA=`cap` allows, slower ones first."""
    within = _within(cap)
    return tuple(name for name in isa_levels() if name in within and _cpu_has(name))


@cache
def level(instruction_set: str) -> int:
    """Return the rank of an instruction set's level among all: of a higher one rows are taken first."""
    return isa_levels().index(instruction_sets()[instruction_set].level)


def supports(instruction_set: str) -> bool:
    """Tell whether kernels of this instruction set may run here and now."""
    return instruction_set in _within(os.environ.get("TWOFOUR_ISA", "")) and _cpu_has(instruction_set)


def unavailable(instruction_set: str) -> str | None:
    """Return why kernels of this instruction set cannot run here and now, or None when they can."""
    if supports(instruction_set):
        return None
    return f"needs {instruction_set}; this CPU and TWOFOUR_ISA allow {isa_text()}"


@dataclass(frozen=True)
class NativeRow:
    """One row of the native tables (native/table.h).

    Attributes:
        index: Its place among the rows of its operation: what the operation's function is called with.
        name: The kernel's symbol.
        operation: "nm_mask", "nm_matmul", "norm" and so on.
        isa: Instruction set it needs.
        pattern: Pattern of the weights, "any" for every N:M, "dense" for none.
        dtype: Computing type, or the encoding of the weight; "8 bits" and so on where only the size of a value matters.
        layout: Order of the weight's bytes, "" where the operation has none.
        least: Fewest tokens for which it is worth measuring.
        most: Most tokens for which it is worth measuring.
    """

    index: int
    name: str
    operation: str
    isa: str
    pattern: str
    dtype: str
    layout: str
    least: int
    most: int

    @property
    def sparse(self) -> bool:
        """Whether it leaves weights out."""
        return self.pattern != "dense"


@cache
def tables() -> dict[str, tuple[NativeRow, ...]]:
    """Return every native row by its operation, both in the tables' order."""
    found: dict[str, list[NativeRow]] = {}
    for name, operation, *fields in extension().table:
        rows_of = found.setdefault(operation, [])
        rows_of.append(NativeRow(len(rows_of), name, operation, *fields))
    return {operation: tuple(rows_of) for operation, rows_of in found.items()}


def rows(operation: str) -> tuple[NativeRow, ...]:
    """Return the native rows of an operation, whether or not they can run here."""
    return tables()[operation]


@cache
def products() -> dict[str, int]:
    """Return the rows that other native calls can run inside, and the place of each as those calls take it."""
    return {name: place for place, name in enumerate(extension().products)}


@cache
def convolutions() -> dict[str, int]:
    """Return the convolutions that a chain can run inside, and the place of each as its call takes it."""
    return {name: place for place, name in enumerate(extension().convolutions)}


def best(operation: str, *, pattern: str | None = None, dtype: str | None = None) -> NativeRow:
    """Return the row of the highest instruction set that may run here and now; of equals the first.

    Args:
        operation: As `NativeRow.operation`.
        pattern: What the row must take; rows for any pattern do.
        dtype: The row's, where the operation has rows of several.
    """
    return _best(operation, pattern, dtype, os.environ.get("TWOFOUR_ISA", ""))


@cache
def _best(operation: str, pattern: str | None, dtype: str | None, cap: str) -> NativeRow:
    fitting = [
        row
        for row in rows(operation)
        if pattern in (None, row.pattern) or row.pattern == "any"
        if dtype in (None, row.dtype) and supports(row.isa)
    ]
    assert fitting, f"no row of {operation} for pattern {pattern} and dtype {dtype}: tables have scalar ones of each"
    return max(fitting, key=lambda row: (level(row.isa), len(_contained(row.isa))))


@cache
def _cpu_has(instruction_set: str) -> bool:
    return extension().cpu_has(instruction_set)


def threads() -> int:
    """Return how many threads a kernel should use: torch's setting."""
    return torch.get_num_threads()


def thread_sources() -> tuple[str, ...]:
    """Return what kernels may take their threads from, the best first: the first that this process has is used.

    Torch's thread pool of its own, of some builds without OpenMP, is none: a team whose members wait for each other
    would wait for ever where two callers share its threads.
    """
    return ("openmp", "torch", "own") if "backend: OpenMP" in torch.__config__.parallel_info() else ("own",)


def threads_backend() -> str:
    """Return what kernels take their threads from.

    "openmp" is the OpenMP runtime that torch has loaded, "torch" its `torch_parallel_for`, "own" a pool of ours.
    """
    return extension().threads_backend()


def release_free_memory() -> None:
    """Give what malloc holds but nobody uses back to the system, where the C library can.

    Encoding a weight leaves holes of tens of megabytes that the next weight does not fit: without this the memory of a
    compilation doubled.
    """
    extension().release_free_memory()
