"""The pruned gradient in plain torch: what every fast kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.kernels.nm_unbiased import nm_unbiased_reference, uniform
from twofour.shapes import Float

PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
"""What "random" chooses from."""


def nm_gradient_reference(
    gradient: Float[Tensor, "samples tokens channels"], mode: str, *, eps: float = 0.0, seed: int = 0
) -> Float[Tensor, "samples tokens channels"]:
    """Return the gradient with at most two of every four consecutive channels non-zero.

    Args:
        gradient: float32 or bfloat16 (samples, tokens, channels), channels a multiple of 4.
        mode: "magnitude", "rescaled", "random" or "unbiased".
        eps: Added to the l1 norm that "rescaled" divides by.
        seed: 32 bits.

    Returns:
        The same shape and dtype; sums of "rescaled" are in float64, the kernels' in float32.
    """
    groups = gradient.float().reshape(-1, 4)
    if mode == "unbiased":
        return nm_unbiased_reference(groups.T, seed).T.reshape(gradient.shape).to(gradient.dtype)
    if mode == "random":
        chosen = (uniform(1, len(groups), seed)[0] * 2**24).long() * 6 >> 24
        keep = torch.zeros_like(groups, dtype=torch.bool).scatter_(
            1, torch.tensor(PAIRS, dtype=torch.long, device=groups.device)[chosen], True
        )
    else:
        best = groups.abs().sort(dim=1, descending=True, stable=True).indices[:, :2]
        keep = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, best, True)
    kept = torch.where(keep, groups, 0.0).view(gradient.shape)
    if mode == "rescaled":
        before, after = (g.abs().double().sum(1, keepdim=True) for g in (gradient, kept))
        kept = kept * torch.where(after == 0, 0.0, before / (after + eps)).float()
    return kept.to(gradient.dtype)
