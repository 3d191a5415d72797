"""Sums over rows, and means over pixels, on the CPU: rows of column_sums.inc."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.conv import channels_last
from twofour.kernels.operands import require_memory

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


def pixel_means(x: Tensor) -> Tensor:
    """Return the mean over the pixels of every channel of every image: what a network's last pool computes.

    Args:
        x: float32 (images, channels, height, width) on the CPU, any strides; channels last is not copied.

    Returns:
        float32 (images, channels), summed as in `column_sums`; NaN where an image has no pixels, as torch answers.

    Raises:
        KernelError: `x` does not fit.
    """
    if x.ndim != 4 or x.dtype is not torch.float32 or not x.is_cpu:
        raise KernelError(
            "the images of a mean over pixels do not fit",
            got=f"x of {x.dtype} {tuple(x.shape)} on {x.device}",
            wanted="torch.float32 (images, channels, height, width) on cpu",
            remedy="convert the images (x.float(), x.cpu())",
        )
    require_memory(x)  # before `channels_last`, which copies
    x = channels_last(x.resolve_neg())
    means = torch.empty(x.shape[:2], dtype=torch.float32, device="cpu")
    native.extension().pixel_means(native.best("column_sums").index, x, means, native.threads())
    return means
