"""The only list of kernels: dispatch, tests, benchmarks, `twofour kernels` and docs/kernels.md all read it."""

from __future__ import annotations

from functools import cache

from twofour.errors import KernelError
from twofour.kernels.base import Kernel
from twofour.kernels.dense_matmul import ONEDNN, PLAIN
from twofour.kernels.nm_matmul import REFERENCE, native_rows


@cache
def rows() -> tuple[Kernel, ...]:
    """Return every kernel there is, whether or not it can run here."""
    return (*native_rows(), REFERENCE, ONEDNN, PLAIN)


@cache
def _by_name() -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in rows()}


def find(name: str) -> Kernel:
    """Return the kernel called `name`.

    Raises:
        KernelError: There is none of that name.
    """
    try:
        return _by_name()[name]
    except KeyError:
        raise KernelError(
            "there is no such kernel",
            got=repr(name),
            wanted=f"one of {', '.join(_by_name())}",
            remedy="`twofour kernels` lists them with what each needs",
        ) from None


def available(operation: str) -> tuple[Kernel, ...]:
    """Return the kernels of `operation` that can run here and now, in the table's order, without the reference."""
    return tuple(
        kernel
        for kernel in rows()
        if kernel.operation == operation and kernel is not REFERENCE and kernel.unavailable() is None
    )
