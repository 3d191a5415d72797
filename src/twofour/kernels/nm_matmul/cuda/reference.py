"""Packed bytes of the GPU's rows opened in plain torch: kernels are compared with it, gradients multiply by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twofour.shapes import Float, Int, Int32, UInt8


def opened_weight(
    values: Int[Tensor, "rows groups"] | UInt8[Tensor, "rows groups"],
    codes: Int32[Tensor, "rows groups//8"],
    scaled: Sequence[Tensor],
    group: int,
    dtype: torch.dtype,
) -> Float[Tensor, "rows 4*groups"]:
    """Return the dense weight that the order of bytes of `few_tokens` stands for, on its device.

    Args:
        values: int32 (rows, groups), both kept values of a group, the first below; uint8 where they are int4.
        codes: int32 (rows, groups / 8), four bits a group.
        scaled: Of int4: bfloat16 scales (rows, runs), and int8 zero points like them.
        group: Inputs that share a scale, 0 without scales.
        dtype: Of the values; float32 for int4.

    Returns:
        (rows, 4 * groups) in `dtype`.
    """
    shifts = torch.arange(0, 32, 4, device=codes.device, dtype=torch.int32)
    places = (codes.unsqueeze(-1) >> shifts).flatten(1) & 15
    if group:
        nibbles = torch.stack((values & 15, values >> 4), -1).to(torch.int32)
        whole = (nibbles - ((nibbles & 8) << 1)).float().flatten(1)
        per = group // 2  # kept values that share a scale
        scale = scaled[0].float().repeat_interleave(per, 1)
        zero = scaled[1].float().repeat_interleave(per, 1) if len(scaled) > 1 else 0.0
        kept = ((whole - zero) * scale).view(len(values), -1, 2)
    else:
        kept = values.view(dtype).view(len(values), -1, 2)
    dense = torch.zeros(*kept.shape[:2], 4, dtype=dtype, device=values.device)
    positions = torch.stack((places & 3, places >> 2), -1).long()
    return dense.scatter_(-1, positions, kept.to(dtype)).flatten(1)
