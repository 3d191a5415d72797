"""Rotary positions in plain torch: what every row of the table has to compute."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.shapes import Float


def reference(
    x: Float[Tensor, "batch length columns"],
    cos: Float[Tensor, "*cosines length width"],
    sin: Float[Tensor, "*sines length width"],
) -> Float[Tensor, "batch length columns"]:
    """Return x cos + (the second half of x negated, then the first) sin for each head; arguments as in `rotation`.

    Args:
        x: Any floating dtype.
        cos: Likewise.
        sin: Likewise.
    """
    width = cos.shape[-1]
    heads = x.reshape(*x.shape[:-1], x.shape[-1] // width, width)
    low, high = heads[..., : width // 2], heads[..., width // 2 :]
    cos, sin = (factor.flatten(0, -3) if factor.ndim > 2 else factor for factor in (cos, sin))
    turned = heads * cos[..., None, :] + torch.cat((-high, low), -1) * sin[..., None, :]
    return turned.reshape(x.shape)
