"""The compiled extension: which instruction sets and threads its kernels may use here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from twofour.errors import KernelError

FUNCTIONS = (
    *("advise_huge_pages", "attention", "attention_of_columns", "attention_rows", "collapse_huge_pages", "conv_block"),
    *("conv_taps", "cpu_has", "dense_int4_bytes", "dense_int4_pack", "dense_matmul", "dense_matmul_rows"),
    "instruction_sets",
    *("layout_bytes", "layout_dtype", "layout_pack", "layout_refill", "layout_refills", "layout_unpack", "nm_compress"),
    *("nm_compress_rows", "nm_conv", "nm_conv_rows", "nm_gradient", "nm_gradient_rows", "nm_groups", "nm_mask"),
    *("nm_mask_rows", "nm_matmul", "nm_matmul_columns", "nm_matmul_rows", "nm_nonzero", "nm_nonzero_rows"),
    *("nm_stripes_assign", "nm_stripes_refine", "nm_stripes_rows", "nm_ties", "nm_ties_rows", "nm_tiles"),
    *("nm_tiles_rows", "nm_unbiased", "nm_unbiased_rows", "norm", "norm_rows", "release_free_memory"),
    "threads_backend",
)
"""Every function of the compiled extension, so that one built from older sources is known before it is called."""


@cache
def extension() -> ModuleType:
    """Import the compiled extension once.

    Torch must come first: the extension's OpenMP symbols bind to the runtime that torch has loaded.

    Raises:
        KernelError: The extension is missing, does not load in this environment, or was built from older sources.
    """
    assert torch.__version__  # the import above is what matters
    try:
        _ext = import_module("twofour.native._ext")
    except ImportError as error:
        raise KernelError(
            "the native extension of twofour does not load",
            got=str(error),
            wanted="twofour/native/_ext built for this Python and linked against torch's OpenMP runtime",
            remedy="reinstall with `pip install --no-build-isolation .` in the environment that holds torch",
        ) from error
    _require_functions(_ext)
    return _ext


def _require_functions(built: ModuleType) -> None:
    """Raise where the Python side calls what the extension does not have, as after an update without a build."""
    if missing := [name for name in FUNCTIONS if not hasattr(built, name)]:
        raise KernelError(
            "the compiled part is older than the sources",
            got=f"{built.__file__} without {', '.join(missing)}",
            wanted="one built from these sources",
            remedy="`make build` in a checkout, or `pip install` again",
        )


@dataclass(frozen=True)
class InstructionSet:
    """One row of isa.def.

    Attributes:
        name: As rows of the kernel tables give it.
        level: What TWOFOUR_ISA calls it: its own name, or of the set that it extends on some CPUs.
        parents: Names of the sets it contains.
    """

    name: str
    level: str
    parents: tuple[str, ...]


@cache
def instruction_sets() -> dict[str, InstructionSet]:
    """Return every instruction set there are kernels for, of any architecture, by name, parents first."""
    return {
        name: InstructionSet(name, level, tuple(parents.split()))
        for name, level, parents in extension().instruction_sets()
    }


def isa_levels() -> tuple[str, ...]:
    """Return what TWOFOUR_ISA may name: instruction sets, slower ones first."""
    return tuple(one.name for one in instruction_sets().values() if one.name == one.level)


@cache
def _levels_within(name: str) -> frozenset[str]:
    """Return the levels that TWOFOUR_ISA=`name` allows: those of the set and of all that it contains."""
    own = instruction_sets()[name]
    return frozenset({own.level}).union(
        *(_levels_within(parent) for parent in (*own.parents, own.level) if parent != name)
    )


def isa() -> str:
    """Return the level kernels may use: the highest that the CPU has and TWOFOUR_ISA, where it is set, contains.

    Raises:
        KernelError: TWOFOUR_ISA is not one of `isa_levels`.
    """
    return _isa(os.environ.get("TWOFOUR_ISA", ""))


@cache
def _isa(cap: str) -> str:
    if cap and cap not in isa_levels():
        raise KernelError(
            "the environment variable TWOFOUR_ISA names no instruction set",
            got=f"TWOFOUR_ISA={cap!r}",
            wanted=f"one of {', '.join(isa_levels())}",
            remedy="unset TWOFOUR_ISA to use everything this CPU has",
        )
    within = [name for name in isa_levels() if not cap or name in _levels_within(cap)]
    return max((name for name in within if _cpu_has(name)), key=level)


@cache
def level(instruction_set: str) -> int:
    """Return the rank of an instruction set's level: how many levels, one inside the next, it contains."""
    own = instruction_sets()[instruction_set].level
    return max((level(name) + 1 for name in _levels_within(own) if name != own), default=0)


def supports(instruction_set: str) -> bool:
    """Tell whether kernels of this instruction set may run here and now."""
    return instruction_sets()[instruction_set].level in _levels_within(isa()) and _cpu_has(instruction_set)


def best_row(table: str, dtype: str = "float32") -> int:
    """Return the index of the row of the highest level that may run here and now, the last of several.

    Args:
        table: Operation whose table it is: "norm", "attention", "nm_stripes".
        dtype: Type of the operands, where the table's rows name one behind the instruction set.
    """
    return _best_row(table, dtype, os.environ.get("TWOFOUR_ISA"))


@cache
def _best_row(table: str, dtype: str, cap: str | None) -> int:
    rows = getattr(extension(), f"{table}_rows")()
    fitting = [index for index, (_, isa, *types) in enumerate(rows) if types in ([], [dtype]) and supports(isa)]
    return max(fitting, key=lambda index: (level(rows[index][1]), index))


@cache
def _cpu_has(instruction_set: str) -> bool:
    return extension().cpu_has(instruction_set)


def threads() -> int:
    """Return how many threads a kernel should use: torch's setting, or 1 where no shared OpenMP pool exists."""
    return torch.get_num_threads() if threads_backend() == "openmp" else 1


def release_free_memory() -> None:
    """Give what malloc holds but nobody uses back to the system, where the C library can.

    Encoding a weight leaves holes of tens of megabytes that the next weight does not fit: without this the memory of a
    compilation doubled.
    """
    extension().release_free_memory()


@cache
def threads_backend() -> str:
    """Return "openmp" when kernels run on torch's own OpenMP pool, "single" when they run on one thread."""
    return extension().threads_backend()
