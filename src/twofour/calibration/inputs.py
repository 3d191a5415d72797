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

from twofour.calibration.inside import cell_input, joined_heads, recurrent_input
from twofour.calls import first_input
from twofour.layers import PrunableWeight

CHUNK = 1 << 24
"""Values unfolded at a time: 64 MB in float32."""


def groups(weight: PrunableWeight) -> int:
    """How many products the weight is made of that share no input: groups of a convolution, query, key and value."""
    return max(int(getattr(weight.module, "groups", 1)), len(weight.feeds))


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


def caller(model: nn.Module, weight: PrunableWeight) -> nn.Module:
    """Return the module whose calls show the inputs of a weight: its own, or the attention that reads its child."""
    return model.get_submodule(weight.layer.rpartition(".")[0]) if weight.kind == "attention_out" else weight.module


def unsupported(weight: PrunableWeight) -> str | None:
    """Say why the inputs of a weight cannot be observed, or None when they can."""
    if weight.attribute.startswith("weight_hr"):
        return f"the input of {weight.attribute}, the hidden state before its projection, cannot be observed"
    return None


def rows(
    weight: PrunableWeight, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], tokens: Tensor | None
) -> Iterator[Tensor]:
    """Yield the rows (groups, count, positions * in) that one call of the weight's layer multiplies with the weight.

    Args:
        weight: Its kind of layer says how.
        module: What `caller` returned.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        tokens: Bool (batch, sequence), False for padding, which is left out where the input has that shape.
    """
    match module:
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            yield from _unfolded(module, first_input(args, kwargs))
        case nn.ConvTranspose1d() | nn.ConvTranspose2d() | nn.ConvTranspose3d():
            yield from _spread(module, first_input(args, kwargs))
        case nn.MultiheadAttention() if weight.kind == "attention_out":
            yield _counting(_batched(module, joined_heads(module, args, kwargs)), tokens).unsqueeze(0)
        case nn.MultiheadAttention():
            fed = [_batched(module, feed.find(args, kwargs)) for feed in weight.feeds]
            yield _stacked([_counting(x, tokens) for x in fed])
        case nn.LSTM() | nn.GRU() | nn.RNN():
            x = recurrent_input(module, weight.attribute, args, kwargs)
            yield _counting(_batched(module, x), tokens).unsqueeze(0)
        case nn.LSTMCell() | nn.GRUCell() | nn.RNNCell():
            yield _counting(cell_input(module, weight.attribute, args, kwargs), None).unsqueeze(0)
        case _:
            yield _counting(first_input(args, kwargs), tokens).unsqueeze(0)


def _batched(module: Any, x: Any) -> Tensor:
    """Return (batch, time, in) of a layer that may want time first."""
    return x if module.batch_first or x.ndim < 3 else x.transpose(0, 1)


def _stacked(parts: list[Tensor]) -> Tensor:
    """Stack the rows of several inputs; where some have fewer, rows of zeros, which add nothing, stand in."""
    count = max(part.shape[0] for part in parts)
    return torch.stack([nn.functional.pad(part, (0, 0, 0, count - part.shape[0])) for part in parts])


def _counting(x: Tensor, tokens: Tensor | None) -> Tensor:
    """Return the rows (count, in) of (..., in) that are no padding."""
    if tokens is not None:
        if x.ndim >= 3 and x.shape[:2] == tokens.shape:
            return x[tokens.to(x.device)].reshape(-1, x.shape[-1])
        if x.ndim == 2 and x.shape[0] == tokens.numel():
            return x[tokens.reshape(-1).to(x.device)]
    return x.reshape(-1, x.shape[-1])


def _unfolded(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Iterator[Tensor]:
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    for part in _split(module, x):
        padded = nn.functional.pad(part, module._reversed_padding_repeated_twice, mode)
        yield _windows(padded, module.kernel_size, module.stride, module.dilation, module.groups)


def _spread(module: nn.modules.conv._ConvTransposeNd, x: Tensor) -> Iterator[Tensor]:
    """A transposed convolution is a convolution of the input with zeros between its values and a reversed kernel."""
    axes = range(len(module.kernel_size))
    for part in _split(module, x):
        reach = [module.dilation[axis] * (module.kernel_size[axis] - 1) for axis in axes]
        places = [(part.shape[2 + axis] - 1) * module.stride[axis] + 1 for axis in axes]
        spread = part.new_zeros(*part.shape[:2], *places)
        spread[(..., *(slice(None, None, module.stride[axis]) for axis in axes))] = part
        pads = [
            (reach[a] - int(module.padding[a]), reach[a] - int(module.padding[a]) + module.output_padding[a])
            for a in axes
        ]
        padded = nn.functional.pad(spread, [side for pair in reversed(pads) for side in pair])
        yield _windows(padded, module.kernel_size, (1,) * len(axes), module.dilation, module.groups, reverse=True)


def _split(module: nn.modules.conv._ConvNd, x: Tensor) -> tuple[Tensor, ...]:
    """Cut a batch so that what is unfolded of each part stays near `CHUNK` values."""
    if x.ndim == len(module.kernel_size) + 1:
        x = x.unsqueeze(0)
    stretch = torch.Size(module.stride).numel() if module.transposed else 1
    values = x[0].numel() * stretch * torch.Size(module.kernel_size).numel()
    return x.split(max(1, CHUNK // max(1, values)))


def _windows(
    x: Tensor,
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    groups: int,
    *,
    reverse: bool = False,
) -> Tensor:
    """Return (groups, batch * places, positions * in / groups) of the padded (batch, in, [spatial])."""
    axes = len(kernel)
    for axis in range(axes):
        x = x.unfold(2 + axis, (kernel[axis] - 1) * dilations[axis] + 1, strides[axis])[..., :: dilations[axis]]
    if reverse:
        x = x.flip(tuple(range(-axes, 0)))
    # (batch, in, *places, *kernel) to (groups, batch, *places, *kernel, in / groups)
    x = x.unflatten(1, (groups, -1)).movedim(1, 0).movedim(2, -1)
    return x.reshape(groups, x.shape[1] * x.shape[2 : 2 + axes].numel(), -1)
