"""BatchNorm folded into the weight before it: one pass over the output less, and the zeros stay where they are."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from twofour.errors import KernelError


def fold_batch_norm(
    weight: Tensor, bias: Tensor | None, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the layer that computes norm(layer(x)) in evaluation mode.

    With s = gamma / sqrt(running variance + eps) per output channel: W' = s W and b' = s (b - running mean) + beta
    (Jacob et al. 2017, arXiv 1712.05877, section 3.2). A row of W is scaled as a whole, so a 2:4 weight stays 2:4.

    Args:
        weight: (out, ...) of a Linear or a convolution.
        bias: (out,) or None.
        norm: Batch normalisation over the `out` channels, with running statistics.

    Returns:
        New tensors in the dtype of `weight`; computed in float64.

    Raises:
        KernelError: The normalisation keeps no running statistics, or is over other channels.
    """
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None or norm.num_features != len(weight):
        raise KernelError(
            "the normalisation cannot be folded into the layer",
            got=f"{norm} behind a weight of {len(weight)} output channels",
            wanted="running statistics over the same channels",
            remedy="leave the normalisation where it is, or build it with track_running_stats=True",
        )
    scale, beta = batch_norm_scale(norm), cast("Tensor | None", norm.bias)
    shift = -mean.double() if bias is None else bias.detach().double() - mean.double()
    shift = scale * shift
    shift = shift if beta is None else shift + beta.detach().double()
    rows = scale.view(-1, *[1] * (weight.ndim - 1))
    return (rows * weight.detach().double()).to(weight.dtype), shift.to(weight.dtype)


def batch_norm_scale(norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> Tensor:
    """Return gamma / sqrt(running variance + eps), float64 (channels,), of a normalisation with running statistics."""
    variance, gamma = (
        cast("Tensor | None", held) for held in (norm.running_var, norm.weight)
    )  # affine=False: no gamma
    assert variance is not None
    scale = torch.rsqrt(variance.double() + norm.eps)
    return scale if gamma is None else scale * gamma.detach().double()
