"""What encodings of whole numbers share: the scales of their values."""

from __future__ import annotations

import torch
from torch import Tensor


def dequantize(whole: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return s * (q - z).

    Args:
        whole: Integers (rows, kept).
        scales: float32 (rows, runs); runs divides kept.
        zeros: Shape of `scales`, or None for zero.

    Returns:
        float32 (rows, kept).
    """
    runs = whole.float().view(len(whole), scales.shape[1], -1)
    if zeros is not None:
        runs = runs - zeros.unsqueeze(-1)
    return (runs * scales.unsqueeze(-1)).view(whole.shape)


def nonzero_scales(scales: Tensor) -> Tensor:
    """Give runs of zeros the scale 1; so small that 1 / s overflows counts as zero."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(scales < tiny, torch.ones_like(scales), scales)
