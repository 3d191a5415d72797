"""Measure every kernel that could serve a convolution on images of the example's size, and keep the fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from twofour import native
from twofour.compiler.cache import Cache
from twofour.compiler.choose import ROTATED_BYTES, logger
from twofour.compiler.conv import CompiledConv, PreparedConv
from twofour.compiler.encoding import broken
from twofour.compiler.race import race
from twofour.kernels import convolutions
from twofour.kernels.conv import ConvKernel, Geometry, Images, channels_last
from twofour.kernels.conv_operator import to_numbers
from twofour.kernels.nm_conv import CONV_REFERENCE
from twofour.patterns import Pattern, parse

MOST_COPIES = 16
"""Copies of a weight that one candidate rotates over, at most: packing each takes time."""


PRODUCT_LEAD = 1.1
"""How much faster the rows of nm_matmul must be than those of nm_conv to run a 1x1 convolution: inside a model, where
weights come from memory and a layer before wrote the image, they lose what they gain alone (nm_conv/README.md)."""


@dataclass(frozen=True)
class ConvChoice:
    """What was measured for one convolution and what was chosen.

    Attributes:
        times: Median seconds of every candidate.
        dense_because: Why no sparse kernel was measured, "" when one was.
        origin: Where the times come from that were not taken on this machine, "" where they were.
    """

    times: dict[str, float]
    dense_because: str
    origin: str = ""

    def pick(self, memory: str) -> str:
        """Return the kernel to use: the fastest, or with memory="small" the fastest sparse one where there is one.

        A product that is ahead by less than `PRODUCT_LEAD` counts as slower.
        """
        sparse = {name: s for name, s in self.times.items() if name.startswith("nm_conv")}
        pool = sparse if memory == "small" and sparse else self.times
        return min(pool, key=lambda name: pool[name] * (PRODUCT_LEAD if "_1x1_" in name else 1.0))

    def best(self, operation: str) -> float | None:
        """Return the seconds of the fastest kernel of `operation`, if one was measured."""
        return min((s for name, s in self.times.items() if name.startswith(operation)), default=None)


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
    forms = tuple(parse(text) for text in dict.fromkeys(kernel.pattern for kernel in fitting))
    form = next((form for form in forms if pattern.within(form)), None)
    if form is None:
        return dense, f"{pattern.name}: the convolutions' kernels read {' or '.join(form.name for form in forms)}"
    if not (found := form.check(weight.movedim(1, -1))).ok:
        return dense, broken(form, found)
    best = max(native.level(kernel.isa) for kernel in fitting)
    return (*(kernel for kernel in fitting if native.level(kernel.isa) == best), *dense), ""


def choose_conv(
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    shape: Images,
    footprint: int,
    cache: Cache,
    pattern: Pattern | None,
    because: str = "",
) -> ConvChoice:
    """Measure the candidates for one convolution on channels-last images and keep the fastest.

    Args:
        weight: (out, in / groups, height, width).
        bias: float32 (out,) or None.
        geometry: Of the convolution.
        shape: Images, height and width of the example's input.
        footprint: Bytes of the whole model's weights; see `choose`.
        cache: Times measured earlier on this machine.
        pattern: What the weight obeys along its input channels, None for a dense one.
        because: Why there is no pattern.
    """
    kernels, because = conv_candidates(weight, geometry, pattern, because)
    copies = max(1, min(footprint, ROTATED_BYTES) // (weight.numel() * 4))
    copies = min(copies, MOST_COPIES)
    numbers = "/".join(map(str, to_numbers(geometry)))
    size = "x".join(map(str, shape))
    key = cache.key(f"conv/{numbers}{'+bias' if bias is not None else ''}@{size}", copies)
    names = [kernel.name for kernel in kernels]
    times = cache.times(key, names, lambda: _measure(kernels, weight, bias, geometry, shape, copies))
    return ConvChoice(times, because, cache.origin([key]))


def _measure(
    kernels: tuple[ConvKernel, ...],
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    shape: Images,
    copies: int,
) -> tuple[dict[str, float], bool]:
    """Return the seconds of each kernel, and whether their order is settled."""
    size, draw = (shape[0], geometry.in_channels, *shape[1:]), torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=draw, dtype=torch.float32, device="cpu")
    x, prepared = channels_last(x), {}

    def calls(kernel: ConvKernel) -> list[Callable[[], object]]:
        if kernel.layout not in prepared:
            first = kernel.prepare(weight, geometry, shape)
            opaque = first.is_mkldnn
            again = [kernel.prepare(weight, geometry, shape) if opaque else first.clone() for _ in range(copies - 1)]
            prepared[kernel.layout] = [first, *again]
        held = [PreparedConv(kernel.name, geometry, tensor, images=shape) for tensor in prepared[kernel.layout]]
        return [partial(CompiledConv("measured", one, bias), x) for one in held]

    with torch.inference_mode():
        found, settled = race({kernel.name: calls(kernel) for kernel in kernels}, cold=copies > 1)
    best = min(found, key=found.__getitem__)
    logger.info("%s on %s: %s, %.4f ms", geometry, shape, best, found[best] * 1e3)
    return found, settled
