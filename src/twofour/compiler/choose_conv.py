"""Measure every kernel that could serve a convolution on images of the example's size, and keep the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod

import torch
from torch import Tensor

from twofour.compiler.choose import ROTATED_BYTES, Choice, race_kernels
from twofour.compiler.conv import CompiledConv, PreparedConv
from twofour.compiler.encoding import broken
from twofour.kernels import convolutions, find_convolution
from twofour.kernels.base import widest
from twofour.kernels.conv import ConvKernel, Geometry, Images, channels_last
from twofour.kernels.conv_operator import to_numbers
from twofour.kernels.dispatch import DispatchTable
from twofour.kernels.nm_conv import CONV_REFERENCE
from twofour.measure.cache import Cache
from twofour.patterns import Pattern

MOST_COPIES = 16
"""Copies of a weight that one candidate rotates over, at most: packing each takes time."""


def conv_candidates(
    weight: Tensor, geometry: Geometry, pattern: Pattern | None, because: str
) -> tuple[tuple[ConvKernel, ...], str]:
    """Return the kernels worth measuring for a convolution, and why none of them is sparse, "" when some are.

    Of the native rows only those of the highest instruction-set level are worth measuring.

    Args:
        weight: (out, in / groups, height, width).
        geometry: Of the convolution.
        pattern: What the weight obeys along its input channels, None for a dense one.
        because: Why there is no pattern.
    """
    dense = tuple(k for k in convolutions() if k.operation == "dense_conv" and not k.refuses(geometry))
    sparse = [k for k in convolutions() if k.operation == "nm_conv" and k is not CONV_REFERENCE]
    fitting = [kernel for kernel in sparse if kernel.refuses(geometry) is None]
    if not fitting:
        return dense, str(sparse[0].refuses(geometry))
    if pattern is None:
        return dense, because
    forms = [form for form in dict.fromkeys(kernel.form for kernel in fitting) if form is not None]
    form = next((form for form in forms if pattern.within(form)), None)
    if form is None:
        return dense, f"{pattern.name}: the convolutions' kernels read {' or '.join(form.name for form in forms)}"
    if not (found := form.check(weight.movedim(1, -1))).ok:
        return dense, broken(form, found)
    return (*widest(fitting), *dense), ""


def pick(times: Mapping[str, float], memory: str) -> str:
    """Return the kernel to use: the fastest, or with memory="small" the fastest sparse one where there is one.

    One that is ahead of the others by less than its `lead` counts as slower.
    """
    kernels = [find_convolution(name) for name in times]
    pool = [kernel for kernel in kernels if kernel.sparse and memory == "small"] or kernels
    return min(pool, key=lambda kernel: times[kernel.name] * kernel.lead).name


def choose_conv(
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    shape: Images,
    *,
    memory: str,
    footprint: int,
    cache: Cache,
    pattern: Pattern | None,
    because: str = "",
) -> tuple[Choice, str]:
    """Measure the candidates for one convolution on channels-last images and keep the fastest.

    Args:
        weight: (out, in / groups, height, width).
        bias: float32 (out,) or None.
        geometry: Of the convolution.
        shape: Images, height and width of the example's input.
        memory: "fast" takes the fastest kernel, "small" a sparse one where the weight is 2:4.
        footprint: Bytes of the whole model's weights; see `choose`.
        cache: Times measured earlier on this machine.
        pattern: What the weight obeys along its input channels, None for a dense one.
        because: Why there is no pattern.

    Returns:
        The choice at the output's pixels of all images, and why no sparse kernel was measured, "" when one was.
    """
    kernels, because = conv_candidates(weight, geometry, pattern, because)
    copies = min(MOST_COPIES, max(1, min(footprint, ROTATED_BYTES) // (weight.numel() * 4)))
    numbers, size = "/".join(map(str, to_numbers(geometry))), "x".join(map(str, shape))
    key = cache.key(f"conv/{numbers}{'+bias' if bias is not None else ''}@{size}", copies)
    draw = torch.Generator().manual_seed(0)
    count, height, width = shape

    def measure() -> tuple[dict[str, float], bool]:
        x = torch.randn((count, geometry.in_channels, height, width), generator=draw, dtype=torch.float32, device="cpu")
        x = channels_last(x)

        def prepare(kernel: ConvKernel) -> Tensor:
            return kernel.prepare(weight, geometry, shape)

        def copy(kernel: ConvKernel, first: Tensor) -> Tensor:
            return prepare(kernel) if first.is_mkldnn else first.clone()

        def call(kernel: ConvKernel, tensor: Tensor) -> Callable[[], object]:
            return partial(CompiledConv("measured", PreparedConv(kernel.name, geometry, tensor, images=shape), bias), x)

        return race_kernels(kernels, prepare, copy, call, copies, f"{geometry} on {shape}")

    times = cache.times(key, [kernel.name for kernel in kernels], measure)
    pixels = count * prod(geometry.output(height, width))
    return Choice(DispatchTable((), (pick(times, memory),)), {pixels: times}, {}, cache.origin([key])), because
