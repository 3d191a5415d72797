"""`twofour::conv`: the registered operator of a compiled convolution, for torch.compile and torch.export.

In eager mode the kernel is called directly; the registered operator costs a few microseconds a call more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry, PreparedConv
from twofour.kernels.nm_conv.layout import group_bytes
from twofour.kernels.operator import inference_only
from twofour.kernels.quantization import Quantization
from twofour.kernels.registration import below_autograd, register
from twofour.kernels.table import find

_SCHEMA = (
    "conv(Tensor x, Tensor weight, Tensor? bias, str kernel, int[] geometry, "
    'str activation="none", Tensor? other=None, float? x_scale=None, int x_zero=0) -> Tensor'
)


def to_numbers(geometry: Geometry) -> list[int]:
    """Return a geometry as the registered operator carries it."""
    pairs = (geometry.kernel, geometry.stride, geometry.before, geometry.after, geometry.dilation)
    return [geometry.in_channels, geometry.out_channels, *(size for pair in pairs for size in pair), geometry.groups]


def from_numbers(numbers: Sequence[int]) -> Geometry:
    """Read what `to_numbers` wrote.

    Raises:
        KernelError: The numbers describe no convolution.
    """
    good = len(numbers) == 13 and min(numbers) >= 0 and min(*numbers[:6], *numbers[10:]) >= 1
    if not good or numbers[0] % numbers[12] or numbers[1] % numbers[12]:
        raise KernelError(
            "the numbers describe no convolution",
            got=str(list(numbers)),
            wanted="13 sizes of a Geometry, as `to_numbers` writes them",
            remedy="compile the model again, or pass `to_numbers(geometry)` of a compiled convolution",
        )
    first, second, *rest = numbers
    pairs = [(rest[i], rest[i + 1]) for i in range(0, 10, 2)]
    return Geometry(first, second, pairs[0], pairs[1], pairs[2], pairs[3], pairs[4], rest[10])


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernel: str,
    geometry: Sequence[int],
    activation: str = "none",
    other: Tensor | None = None,
    x_scale: float | None = None,
    x_zero: int = 0,
) -> Tensor:
    shape, chosen = from_numbers(geometry), find(kernel, ConvKernel)
    if reason := chosen.refuses(shape):
        raise KernelError(
            f"{kernel} cannot run this convolution",
            got=reason,
            wanted="a model compiled on this machine",
            remedy="compile the model again, or load its file with twofour.load",
        )
    if (chosen.pattern, chosen.dtype) == ("2:4", "float32") and weight.nbytes < shape.groups * group_bytes(shape):
        raise KernelError(
            "the weight of a convolution does not fit",
            got=f"{weight.nbytes} bytes",
            wanted=f"at least {shape.groups * group_bytes(shape)} for {kernel}",
            remedy="pass weight, kernel and geometry of one compiled convolution",
        )
    if bias is not None and (tuple(bias.shape) != (shape.out_channels,) or bias.dtype is not torch.float32):
        raise KernelError(
            "the bias of a convolution does not fit",
            got=f"{bias.dtype} {tuple(bias.shape)}",
            wanted=f"torch.float32 ({shape.out_channels},)",
            remedy="pass the bias of the convolution that the weight belongs to",
        )
    prepared = PreparedConv(chosen, weight, geometry=shape)
    problem = replace(ConvProblem.of(shape, activation), quantization=Quantization(x_scale, x_zero))
    return chosen.run(x, prepared, bias, problem, other)


def _no_gradient(x: Tensor, *arguments: Any) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        raise inference_only()
    with below_autograd():
        return torch.ops.twofour.conv(x, *arguments)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, kernel: str, geometry: Sequence[int], *_: Any) -> Tensor:
    shape = from_numbers(geometry)
    size = (x.shape[0], shape.out_channels, *shape.sizes(x.shape[2], x.shape[3]))
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


register(_SCHEMA, _fake, CompositeExplicitAutograd=_conv, Autograd=_no_gradient)
