"""Fused blocks on the CPU: rows of fused_block.inc."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from twofour import native
from twofour.native.surroundings import plain


def fused_block(program: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Run a program: every output is written whole.

    Args:
        program: What `schedule.program` returned.
        inputs: In the order of its loads, float32, bfloat16, bool or uint8, of any strides; they are broadcast to each
            other. Of a gather the table (rows, width), then int64 (..., 1).
        outputs: In the order of its stores; one that holds row values has one number for each row. None may share
            memory with an input.

    Raises:
        KernelError: The operands do not fit each other or the program.
    """
    given = plain("a fused block", *inputs)
    program.run(native.best("fused_block").index, list(given), list(outputs), native.threads())
