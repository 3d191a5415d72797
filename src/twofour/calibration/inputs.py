"""What a weight is multiplied with: its layer's inputs as rows of the matrix product that the layer is.

A Linear is y = x W^T. A convolution is the same product after unfolding: for each of its groups and output positions,
the row holds all channels of the first kernel position, then of the second, as `PrunableWeight.reduction_last` orders
the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from twofour.layers import PrunableWeight

_OBSERVED = ("linear", "hf_conv1d", "conv1d", "conv2d", "conv3d")
"""Kinds of layer whose only input is the argument of their call."""

CHUNK = 1 << 24
"""Values unfolded at a time: 64 MB in float32."""


def groups(weight: PrunableWeight) -> int:
    """How many products the weight is made of that share no input: the groups of a convolution, else 1."""
    return int(getattr(weight.module, "groups", 1))


def matrix(weight: PrunableWeight, tensor: Tensor) -> Tensor:
    """Lay a tensor of the weight's shape out as (groups, out / groups, positions * in); groups of a pattern stay whole.

    For a Linear that is (1, out, in).
    """
    last = weight.reduction_last(tensor)
    count = groups(weight)
    return last.reshape(count, last.shape[0] // count, -1)


def from_matrix(weight: PrunableWeight, values: Tensor) -> Tensor:
    """Undo `matrix`: (groups, out / groups, positions * in) to the weight's own shape."""
    return weight.from_reduction_last(values.reshape(weight.reduction_last(weight.parameter).shape))


def unsupported(weight: PrunableWeight) -> str | None:
    """Say why the inputs of a weight cannot be observed, or None when they can."""
    if weight.kind in _OBSERVED:
        return None
    return f"the inputs of {type(weight.module).__name__}.{weight.attribute} cannot be observed"


def rows(
    weight: PrunableWeight, args: tuple[Any, ...], kwargs: Mapping[str, Any], tokens: Tensor | None
) -> Iterator[Tensor]:
    """Yield the rows (groups, count, positions * in) that one call of the weight's layer multiplies with the weight.

    Args:
        weight: Its kind of layer says how.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        tokens: Bool (batch, sequence), False for padding, which is left out where the input has that shape.
    """
    x = args[0] if args else next(iter(kwargs.values()))
    module = weight.module
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        yield from _unfolded(module, x)
    else:
        yield _counting(x, tokens).unsqueeze(0)


def _counting(x: Tensor, tokens: Tensor | None) -> Tensor:
    """Return the rows (count, in) of (..., in) that are no padding."""
    if tokens is not None:
        if x.ndim >= 3 and x.shape[:2] == tokens.shape:
            return x[tokens.to(x.device)].reshape(-1, x.shape[-1])
        if x.ndim == 2 and x.shape[0] == tokens.numel():
            return x[tokens.reshape(-1).to(x.device)]
    return x.reshape(-1, x.shape[-1])


def _unfolded(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Iterator[Tensor]:
    axes = len(module.kernel_size)
    if x.ndim == axes + 1:
        x = x.unsqueeze(0)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    positions = x[0, 0].numel() * x.shape[1] * torch.Size(module.kernel_size).numel()
    for part in x.split(max(1, CHUNK // max(1, positions))):
        part = nn.functional.pad(part, module._reversed_padding_repeated_twice, mode)
        for axis, (size, stride, dilation) in enumerate(
            zip(module.kernel_size, module.stride, module.dilation, strict=True)
        ):
            part = part.unfold(2 + axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
        # (batch, channels, *places, *kernel) to (groups, batch, *places, *kernel, channels / groups)
        part = part.unflatten(1, (module.groups, -1)).movedim(1, 0).movedim(2, -1)
        yield part.reshape(module.groups, part.shape[1] * part.shape[2 : 2 + axes].numel(), -1)
