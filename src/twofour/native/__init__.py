"""The compiled extension: which instruction sets and threads its kernels may use here."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from twofour.errors import KernelError

ISA_LEVELS = ("scalar", "avx2", "avx512", "amx")
"""Instruction-set levels, slowest first: what TWOFOUR_ISA caps."""

ISA_EXTRAS = {"avx512_bf16": "avx512", "avx512_vnni": "avx512"}
"""Instruction sets that some CPUs of a level have and others lack, and their level."""

FUNCTIONS = (
    *("advise_huge_pages", "attention", "attention_of_columns", "attention_rows", "collapse_huge_pages", "conv_block"),
    *("conv_taps", "cpu_has", "dense_int4_bytes", "dense_int4_pack", "dense_matmul", "dense_matmul_rows"),
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


def isa() -> str:
    """Return the level kernels may use: what the CPU has, capped by the environment variable TWOFOUR_ISA.

    Raises:
        KernelError: TWOFOUR_ISA is not one of `ISA_LEVELS`.
    """
    detected = max((level for level in ISA_LEVELS if _cpu_has(level)), key=ISA_LEVELS.index)
    cap = os.environ.get("TWOFOUR_ISA", "")
    if not cap:
        return detected
    if cap not in ISA_LEVELS:
        raise KernelError(
            "the environment variable TWOFOUR_ISA names no instruction set",
            got=f"TWOFOUR_ISA={cap!r}",
            wanted=f"one of {', '.join(ISA_LEVELS)}",
            remedy="unset TWOFOUR_ISA to use everything this CPU has",
        )
    return min(detected, cap, key=ISA_LEVELS.index)


def level(instruction_set: str) -> int:
    """Return the rank of an instruction set's level in `ISA_LEVELS`."""
    return ISA_LEVELS.index(ISA_EXTRAS.get(instruction_set, instruction_set))


def supports(instruction_set: str) -> bool:
    """Tell whether kernels of this instruction set may run here and now."""
    return level(instruction_set) <= ISA_LEVELS.index(isa()) and _cpu_has(instruction_set)


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
