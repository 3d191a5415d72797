"""Sums over rows on the CPU: rows of column_sums.inc."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native

DTYPES = (torch.float32, torch.bfloat16)
"""Of what is summed."""


def column_sums(rows: Tensor) -> Tensor:
    """Return the sums over the rows of a matrix: a bias's gradient.

    Args:
        rows: float32 or bfloat16 (rows, columns) on the CPU, its last axis contiguous.

    Returns:
        float32 (columns,). Sums of 64 rows are formed first and then added, in the same order on any number of threads.
    """
    sums = torch.empty(rows.shape[1], dtype=torch.float32, device="cpu")
    native.extension().column_sums(native.best("column_sums").index, rows, sums, native.threads())
    return sums
