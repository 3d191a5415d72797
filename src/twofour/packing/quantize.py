"""Kept values as whole numbers with scales: int8 with one scale a row, int4 with one a group of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

INT8_LARGEST = 127
"""Largest magnitude of a symmetric int8 value; -128 is not used, so that a weight and its negative round alike."""

INT4_LARGEST = 7
INT4_LEAST = -8

GROUPS = (32, 64, 128)
"""Inputs that share one scale of an int4 weight."""


def to_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to int8, symmetrically: q = round(w / s), s = max |w| / 127.

    Args:
        values: float32 (rows, kept).

    Returns:
        int8 (rows, kept), float32 scales (rows, 1); a row of zeros has scale 1.
    """
    scales = _nonzero(values.abs().amax(1, keepdim=True) / INT8_LARGEST)
    return (values / scales).round().to(torch.int8), scales


def to_int4(values: Tensor, per_scale: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round runs of kept values to int4.

    Symmetric: q = round(w / s), s = max |w| / 7. Asymmetric: q = round(w / s) + z, s = (max - min) / 15 over the run
    and zero, z = -8 - round(min / s): zero is exact, so pruned and kept zeros stay what they are. s is rounded up to
    a bfloat16, the two bytes that kernels read it as.

    Args:
        values: float32 (rows, kept).
        per_scale: Kept values that share a scale; divides `kept`.
        symmetric: Without zero points.

    Returns:
        int8 (rows, kept) in -8..7; float32 scales (rows, kept / per_scale); whole float32 zeros like them, or None.
    """
    runs = values.view(len(values), -1, per_scale)
    if symmetric:
        scales = _up_to_bfloat16(_nonzero(runs.abs().amax(-1) / INT4_LARGEST))
        zeros = None
    else:
        low, high = runs.amin(-1).clamp(max=0), runs.amax(-1).clamp(min=0)
        scales = _up_to_bfloat16(_nonzero((high - low) / (INT4_LARGEST - INT4_LEAST)))
        zeros = INT4_LEAST - (low / scales).round()
    whole = (runs / scales.unsqueeze(-1)).round()
    if zeros is not None:
        whole = whole + zeros.unsqueeze(-1)
    return whole.clamp(INT4_LEAST, INT4_LARGEST).to(torch.int8).view_as(values), scales, zeros


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


def _nonzero(scales: Tensor) -> Tensor:
    """Give runs of zeros the scale 1; so small that 1 / s overflows counts as zero."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(scales < tiny, torch.ones_like(scales), scales)


def _up_to_bfloat16(scales: Tensor) -> Tensor:
    """Round positive scales up to 8 significant bits, so that the largest value still fits: at most 0.8 % more.

    A scale that is one already stays, also where a quotient put it a rounding error above: rounding what is rounded
    changes nothing.
    """
    return (((scales * (1 - 2**-22)).view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
