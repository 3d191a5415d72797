"""Convolutions of low bits on measured kernels: the same bits as `quantization.in_whole_numbers`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from twofour import native, quantization
from twofour.compiler.plan import LayerPlan
from twofour.compiler.replaceable import IN_FLOATS
from twofour.compiler.stamps import Stamp, has_changed, stamp_of
from twofour.compiler.terms import Terms
from twofour.errors import KernelError
from twofour.kernels.base import Prepared, widest
from twofour.kernels.bits_matmul import BitWeight
from twofour.kernels.bits_matmul.conv import BitsConv, BitsConvProblem, bits_conv_rows
from twofour.kernels.conv import Geometry, Images
from twofour.kernels.conv_operator import to_numbers
from twofour.kernels.dense_matmul import PLAIN
from twofour.kernels.dispatch import DispatchTable
from twofour.measure.chooser import race
from twofour.quantization import LowBits

_FLOATS = "floats"
"""The layer in the floats that hold its whole numbers, among what is timed."""

UNSEEN = 14
"""Height and width of the image on which kernels are measured that no example shows."""


@dataclass
class ConvCodes:
    """What a convolution of low bits runs on: its weight in codes, prepared anew where what it was made from changes.

    Attributes:
        name: Of the layer.
        row: Its kernel.
        prepared: The weight as the kernel reads it.
        problem: Geometry, and range of the inputs.
        bias: float32 (out,) or None.
        images: The input its kernel was chosen for.
        stamp: What it was prepared from. What is written through `.data` or numpy, or to tensors made in inference
            mode, leaves no trace and is not seen.
    """

    name: str
    row: BitsConv
    prepared: Prepared
    problem: BitsConvProblem
    bias: Tensor | None
    images: Images
    stamp: Stamp

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return the answer, None for inputs that floats serve: another dtype or device, traced, or for a gradient."""
        if x.dtype is not torch.float32 or not x.is_cpu or (x.requires_grad and torch.is_grad_enabled()):
            return None
        if is_compiling() or _is_tracing() or _len_torch_dispatch_stack() or x.ndim not in (3, 4):
            return None
        self.follow(module)
        try:
            images = x.resolve_neg() if x.ndim == 4 else x.resolve_neg()[None]
            y = self.row.run(images, self.prepared, self.bias, self.problem)
        except KernelError as error:
            raise error.for_layer(self.name) from None
        return y if x.ndim == 4 else y[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, (
            self.name,
            self.row.name,
            self.prepared.tensor,
            self.problem,
            self.bias,
            self.images,
            self.stamp,
        )

    def follow(self, module: nn.Module) -> None:
        """Prepare the weight anew where the layer holds other values than it was made from."""
        if has_changed(self.stamp, module):
            made = prepared_conv(self.name, module, self.row, self.images)
            self.prepared, self.problem, self.bias, self.stamp = made.prepared, made.problem, made.bias, made.stamp


def _found(name: str, row: str, weight: Tensor, *others: Any) -> ConvCodes:
    """Return what a convolution runs on, its kernel by name: refused where it cannot run here."""
    try:
        found = DispatchTable((), (row,)).kernels[0]
    except KernelError as error:
        raise error.for_layer(name) from None
    assert isinstance(found, BitsConv)
    return ConvCodes(name, found, Prepared(found, weight), *others)


def prepared_conv(name: str, module: nn.Module, row: BitsConv, images: Images) -> ConvCodes:
    """Return what a convolution runs on by a row."""
    stamp = stamp_of(module)  # first: what is written while the weight is read is seen at the next call
    weight, problem = codes_of(name, module), _problem(module)
    bias = module.bias.detach().float() if isinstance(module.bias, Tensor) else None
    return ConvCodes(name, row, row.prepare(weight, problem.geometry), problem, bias, images, stamp)


def codes_of(name: str, module: nn.Module) -> BitWeight:
    """Return the weight of a layer of low bits in codes (out, inputs)."""
    low = quantization.held_by(module)
    assert low is not None
    whole, scales = low.whole_weight(module, name)
    return BitWeight(low.widths.weights.codes_of(whole.flatten(1)), low.widths.levels, scales.detach().float())


def _problem(module: nn.Module) -> BitsConvProblem:
    low = quantization.held_by(module)
    assert low is not None and isinstance(module, nn.Conv2d)
    return BitsConvProblem(Geometry.of(module), low.range(module))


def run_conv(
    name: str, module: nn.Module, low: LowBits, entry: LayerPlan, images: Images | None, terms: Terms
) -> LayerPlan:
    """Choose what one convolution runs on, let it run so, and return its plan."""
    assert isinstance(module, nn.Conv2d)
    geometry, widths = Geometry.of(module), low.widths
    size = images or _unseen(geometry)
    reasons = {row: row.refuses(geometry, widths.levels, low.range(module), size) for row in bits_conv_rows()}
    fitting = [row for row, reason in reasons.items() if reason is None]
    if module.weight.dtype is not torch.float32 or not fitting:
        here = next((reason for row, reason in reasons.items() if row.unavailable() is None and reason), None)
        why = here or f"its weight is {module.weight.dtype}, the kernels of convolutions take float32"
        return replace(entry, reason=f"dense: {widths.name}: {why}; {IN_FLOATS}")
    fastest = [
        widest([row for row in fitting if row.layout == layout])[0] for layout in {row.layout for row in fitting}
    ]
    runs = {row.name: prepared_conv(name, module, row, size) for row in sorted(fastest, key=lambda row: row.name)}
    x = torch.rand(size[0], geometry.in_channels, *size[1:], dtype=torch.float32, device="cpu")
    x = x.contiguous(memory_format=torch.channels_last)
    calls: dict[str, Any] = {key: partial(found, module, x) for key, found in runs.items()}
    bias = None if module.bias is None else module.bias.detach()
    calls[_FLOATS] = partial(module, x)
    calls[PLAIN.name] = partial(module._conv_forward, x, module.weight.detach(), bias)
    case = repr((to_numbers(geometry), size, widths.name, low.static, module.bias is None, native.threads()))
    key = terms.cache.key(f"bits_conv/{hashlib.sha256(case.encode()).hexdigest()[:16]}")
    seconds = terms.cache.times(key, tuple(calls), lambda: race(calls, seconds=0.1))
    best = min(runs, key=seconds.__getitem__)
    if seconds[_FLOATS] < seconds[best]:
        return replace(entry, reason=f"dense: {widths.name}: floats are faster here; {IN_FLOATS}")
    low.runs = runs[best]
    return _described(entry, runs[best], seconds, widths.name, terms.cache.origin([key]))


def _unseen(geometry: Geometry) -> Images:
    reach = [geometry.dilation[i] * (geometry.kernel[i] - 1) + 1 for i in range(2)]
    return 1, max(UNSEEN, reach[0]), max(UNSEEN, reach[1])


def _described(entry: LayerPlan, runs: ConvCodes, seconds: dict[str, float], widths: str, origin: str) -> LayerPlan:
    ratio, design = seconds[PLAIN.name] / seconds[runs.row.name], runs.row.layout.removeprefix("bits_")
    reason = f"{widths} {design}: {ratio:.2f}x the speed of torch's float32 convolution"
    reason += f" ({origin})" if origin else ""
    height, width = runs.problem.geometry.output(*runs.images[1:])
    tokens = runs.images[0] * height * width
    return replace(
        entry,
        tokens=tokens,
        kernel=runs.row.name,
        dispatch=runs.row.name,
        reason=reason,
        dense_ms=1e3 * seconds[runs.row.name],
        bytes_after=entry.bytes_before + runs.prepared.nbytes,
        times={tokens: {key: found for key, found in seconds.items() if key != _FLOATS}},
    )
