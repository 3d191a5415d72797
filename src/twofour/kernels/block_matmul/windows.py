"""Indices of inputs as places in windows of 128: of byte weights whose inputs stand apart, laid out in blocks.h."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native


def window() -> int:
    """Return the inputs of a window: kWindow of blocks.h."""
    return native.extension().block_window


def to_windows(starts: Tensor, indices: Tensor, zero: int, windows: int) -> tuple[Tensor, Tensor]:
    """Write the inputs that strips keep as places in windows.

    Args:
        starts: int64 (strips + 1,): where the inputs of each strip begin.
        indices: int64 (inputs,): rising in each strip, then `zero` where it is filled up to whole vectors.
        zero: What stands for no input.
        windows: How many there are.

    Returns:
        How many inputs of each window each strip keeps, uint8 (strips, windows), and the place of each in its window,
        uint8 (inputs,), 0 where a strip is filled up.
    """
    strip = torch.arange(len(starts) - 1, device="cpu").repeat_interleave(starts.diff())
    held = indices != zero
    of_window = strip[held] * windows + indices[held] // window()
    counts = torch.bincount(of_window, minlength=(len(starts) - 1) * windows).view(-1, windows)
    return counts.to(torch.uint8), (indices % window() * held).to(torch.uint8)


def from_windows(starts: Tensor, counts: Tensor, places: Tensor, zero: int) -> Tensor | None:
    """Return the indices that `to_windows` was given, int64 (inputs,); None where counts exceed the strips."""
    lengths, kept = starts.diff(), counts.long().sum(1)
    if bool((kept > lengths).any()):
        return None
    of_window = (
        torch.arange(counts.shape[1], device="cpu").repeat(len(counts)).repeat_interleave(counts.flatten().long())
    )
    first = (starts[:-1] - torch.cat([kept.new_zeros(1), kept.cumsum(0)[:-1]])).repeat_interleave(kept)
    at = torch.arange(int(kept.sum()), device="cpu") + first
    indices = torch.full(places.shape, zero, dtype=torch.int64, device="cpu")
    indices[at] = of_window * window() + places[at].long()
    return indices
