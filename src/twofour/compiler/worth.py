"""Which of the rows that could multiply are worth measuring on this CPU."""

from __future__ import annotations

from collections.abc import Sequence

from twofour import native
from twofour.kernels import Kernel
from twofour.kernels.base import widest

WIDE = ("avx512", "amx")
"""What the names of instruction sets of 512 bits begin with."""


def worth_measuring(kernels: Sequence[Kernel], *, lacking: bool = False) -> list[Kernel]:
    """Return torch's rows, and of the native ones those of AVX-512 and above: AMX may lose.

    Below, those of the highest level of their layout: AVX-VNNI has rows of bytes and takes those of planes from AVX2.
    A row for CPUs with a part of a level gives way to the same one for those with more of it.

    Args:
        kernels: Those that could.
        lacking: Whether rows of AVX-512 are missing here, for a part of it that the CPU lacks: what those count or look
            up, rows of AVX2 do in another way, and are measured too.
    """
    names = {kernel.name for kernel in kernels}
    wide = any(kernel.isa.startswith(WIDE) for kernel in kernels)
    held = {kernel.layout for kernel in kernels if kernel.isa.startswith(WIDE)}

    def worth(kernel: Kernel) -> bool:
        if any(f"{kernel.name.rpartition('__')[0]}__{more}" in names for more in native.extensions(kernel.isa)):
            return False
        if kernel.isa.startswith((*WIDE, "any")):
            return True
        if wide and (not lacking or kernel.layout in held):
            return False
        return kernel in widest([other for other in kernels if other.layout == kernel.layout])

    return [kernel for kernel in kernels if worth(kernel)]
