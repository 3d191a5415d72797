"""The native sampled product: gradients and inputs in, the weight gradient at kept places out."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.native import NativeRow
from twofour.packing import Packed
from twofour.shapes import Float32, Real


def nm_sddmm(
    left: Real[Tensor, "tokens out"], right: Real[Tensor, "tokens in"], places: Packed
) -> Float32[Tensor, "out kept"]:
    """Multiply at kept places alone; float32 sums, exact but for their order.

    Args:
        left: float32 or bfloat16 (tokens, out) on the CPU.
        right: (tokens, in) of the same type.
        places: Of a 2:4 weight (out, in), packed along its last axis; its values are not read.

    Returns:
        float32 (out, in / 2), in the order of the packed values.
    """
    left, right = (side if side.stride(-1) == 1 else side.contiguous() for side in (left, right))
    values = torch.zeros if not len(left) else torch.empty
    found = values(left.shape[1], right.shape[1] // 2, dtype=torch.float32, device="cpu")
    if len(left):
        native.extension().nm_sddmm(row_for(left.dtype).index, left, right, places.indices, found, native.threads())
    return found


def row_for(dtype: torch.dtype) -> NativeRow:
    """Return the row that serves operands of a type here: bfloat16 ones have a row of their own on some processors."""
    return native.best("nm_sddmm", dtype=None if dtype is torch.bfloat16 else "float32")
