"""Mask and pack in plain torch: what every fast kernel is compared with."""

from __future__ import annotations

from torch import Tensor

from twofour.packing.formats.indices import encode
from twofour.patterns import project_reference
from twofour.shapes import Float32, UInt8


def nm_compress_reference(
    weight: Float32[Tensor, "rows columns"],
) -> tuple[int, Float32[Tensor, "rows columns//2"], UInt8[Tensor, "rows bytes"]]:
    """Keep the two largest magnitudes of every four values; the lowest index wins ties.

    Args:
        weight: float32 (rows, columns), columns a multiple of 4, any strides.

    Returns:
        How many non-zero values were dropped (0: the weight was 2:4 already); the kept values, float32
        (rows, columns / 2); their indices, uint8 (rows, ceil(columns / 8)), as docs/formats.md draws them.

    Raises:
        PatternError: A value is NaN or infinite (the native kernels keep it and leave the refusal to the caller).
    """
    rows, columns = weight.shape
    keep = project_reference(weight, 2, 4, absolute=True).view(rows, columns // 4, 4)
    positions = keep.nonzero()[:, -1].view(rows, columns // 4, 2)
    values = weight.reshape(keep.shape).gather(-1, positions).flatten(1)
    dropped = int(((weight != 0) & ~keep.view(rows, columns)).sum())
    return dropped, values, encode(positions, 4)
