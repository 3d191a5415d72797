"""Attention in plain torch: what every row of the table has to compute."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.shapes import Float, Shaped


def reference(
    q: Float[Tensor, "batch heads queries width"],
    k: Float[Tensor, "batch groups keys width"],
    v: Float[Tensor, "batch groups keys out"],
    mask: Shaped[Tensor, "*mask"] | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    unseen: float = 0.0,
) -> Float[Tensor, "batch heads queries out"]:
    """Return softmax(scale q k^T + mask) v; arguments as in `attention`, any floating dtype."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1), -torch.inf
        )
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    weights = scores.softmax(-1)
    return weights.masked_fill(scores.isneginf().all(-1, keepdim=True), unseen) @ v
