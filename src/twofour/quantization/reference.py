"""The whole-number reference: sums of 64-bit integers by torch, which kernels and fake-quantised layers must equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from twofour.errors import QuantizationError
from twofour.quantization.carried import of


@contextmanager
def in_whole_numbers(model: nn.Module) -> Iterator[None]:
    """Let the layers of low bits make their sums in 64-bit whole numbers inside; nothing is differentiable there.

    Outside, and in evaluation mode, they make the same sums in floats that hold them exactly, those of a compiled model
    by its kernels: the answers of a layer are the same to the bit. A compiled model runs layer by layer inside.

    Raises:
        QuantizationError: The model has no such layers.
    """
    held = of(model)
    if not held:
        raise QuantizationError(
            "the model has no layer of low bits",
            got=type(model).__name__,
            wanted="a model from twofour.quantize",
            remedy='twofour.quantize(model, "w2", "a2") first',
        )
    before = {name: layer.whole for name, layer in held.items()}
    _open.append(None)
    try:
        for layer in held.values():
            layer.whole = True
        with torch.no_grad():
            yield
    finally:
        _open.pop()
        for name, layer in held.items():
            layer.whole = before[name]


_open: list[None] = []
"""One for each `in_whole_numbers` that is open, so that calls of all other models look no further."""


def at_work(model: nn.Module) -> bool:
    """Tell whether layers of a model make their sums in whole numbers now: no engine but the layers may run."""
    return bool(_open) and any(layer.whole for layer in of(model).values())


def integer_product(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Return the sums of whole numbers in int64, as float32; what reads a NaN, a token or a window, is NaN.

    Args:
        module: A Linear or a Conv2d: its stride, padding, dilation and groups.
        x: Whole numbers in float32, (..., in) or ([images,] channels, height, width).
        weight: Whole numbers in float32.
    """
    lost, numbers, whole = x.isnan(), x.nan_to_num(0).long(), weight.long()
    if isinstance(module, nn.Conv2d):
        found = integer_convolution(module, numbers, whole)
        if lost.any():
            lost = integer_convolution(module, lost.long(), torch.ones_like(whole)) > 0
        else:
            lost = torch.zeros((), dtype=torch.bool, device=x.device)
    else:
        lost = lost.any(-1, keepdim=True)
        found = (numbers.reshape(-1, x.shape[-1]) @ whole.t()).view(*x.shape[:-1], len(weight))
    return found.float().masked_fill_(lost, torch.nan)  # out of place it would be laid out anew


def integer_convolution(module: nn.Conv2d, x: Tensor, weight: Tensor) -> Tensor:
    """Return a convolution of int64 images, a product of matrices for each tap of the kernel; padded with zeros."""
    images = x if x.ndim == 4 else x[None]
    padded = functional.pad(images, module._reversed_padding_repeated_twice)
    some = max(1, PIXELS // (padded.shape[2] * padded.shape[3]))
    answer = torch.cat([_convolved(module, part, weight) for part in padded.split(some)])
    if x.ndim == 3:
        return answer[0]
    # As torch's convolution lays its answer out: a mean over places adds them up in the order of memory.
    last = any(map(_channels_last, (x, weight)))
    return answer.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _channels_last(values: Tensor) -> bool:
    return values.is_contiguous(memory_format=torch.channels_last) and not values.is_contiguous()


PIXELS = 1 << 13
"""Of the images that are convolved together: what is multiplied stays in a cache of some hundred KiB."""


def _convolved(module: nn.Conv2d, padded: Tensor, weight: Tensor) -> Tensor:
    """Return the convolution of a few images that have their zeros."""
    (down, across), (step, stride), groups = module.dilation, module.stride, module.groups
    height = (padded.shape[2] - down * (weight.shape[2] - 1) - 1) // step + 1
    width = (padded.shape[3] - across * (weight.shape[3] - 1) - 1) // stride + 1
    channels = padded.transpose(0, 1).contiguous()
    total = torch.zeros(len(weight), len(padded) * height * width, dtype=torch.int64, device=padded.device)
    for i in range(weight.shape[2]):
        for j in range(weight.shape[3]):
            rows = slice(i * down, i * down + step * (height - 1) + 1, step)
            columns = slice(j * across, j * across + stride * (width - 1) + 1, stride)
            seen = channels[:, :, rows, columns].reshape(groups, weight.shape[1], -1)
            # Weights first: torch multiplies 64-bit integers up to ten times as fast that way around.
            for sums, tap, inputs in zip(total.chunk(groups), weight[:, :, i, j].chunk(groups), seen, strict=True):
                sums += tap @ inputs
    return total.view(len(weight), len(padded), height, width).transpose(0, 1)
