"""Convolutions of low bits on measured kernels: the same bits as `quantization.in_whole_numbers`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from twofour import native, quantization
from twofour.compiler.codes import Codes, codes_of, is_coded
from twofour.compiler.plan import LayerPlan
from twofour.compiler.replaceable import IN_FLOATS
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


@dataclass(frozen=True, eq=False)
class ConvOfCodes:
    """A convolution of codes.

    Attributes:
        name: Of the layer.
        row: Its kernel.
        prepared: The weight as the kernel reads it.
        problem: Geometry, and range of the inputs.
        bias: float32 (out,); None without one, and where thresholds hold it.
        images: The input its kernel was chosen for.
    """

    name: str
    row: BitsConv
    prepared: Prepared
    problem: BitsConvProblem
    bias: Tensor | None
    images: Images
    traced: ClassVar[bool] = False

    @classmethod
    def of(
        cls, name: str, module: nn.Conv2d, row: BitsConv, images: Images, prepared: Prepared | None = None
    ) -> ConvOfCodes:
        """Return what a convolution runs on by a row, its weight prepared unless that is given."""
        low = quantization.held_by(module)
        assert low is not None
        problem = BitsConvProblem(Geometry.of(module), low.range(module, name))
        prepared = prepared or row.prepare(codes_of(name, module, low), problem.geometry)
        bias = module.bias.detach().float() if isinstance(module.bias, Tensor) else None
        return cls(name, row, prepared, problem, bias, images)

    @property
    def dispatch_text(self) -> str:
        """Its kernel by name."""
        return self.row.name

    def takes(self, x: Tensor) -> bool:
        """Tell whether kernels read such an input: floats serve images whose codes take 2 GB."""
        known = x.dtype is torch.float32 and x.ndim in (3, 4)
        return known and _holds(self.row, self.problem.geometry, self.problem.quantization.bits, *x.shape[-2:])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the answer to images, or one image."""
        try:
            images = x.resolve_neg() if x.ndim == 4 else x.resolve_neg()[None]
            y = self.row.run(images, self.prepared, self.bias, self.problem)
        except KernelError as error:
            raise error.for_layer(self.name) from None
        return y if x.ndim == 4 else y[0]

    def anew(self, module: nn.Conv2d) -> ConvOfCodes:
        """Return the same for what the layer holds now."""
        return self.of(self.name, module, self.row, self.images, self.prepared if is_coded(module) else None)

    def restored(self) -> BitWeight:
        """Return the weight (out, inputs)."""
        return self.row.restore(self.prepared, self.problem.geometry)

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, (self.name, self.row.name, self.prepared.tensor, self.problem, self.bias, self.images)


_holds = lru_cache(maxsize=256)(BitsConv.holds)


def _found(name: str, row: str, weight: Tensor, *others: Any) -> ConvOfCodes:
    """Return what a convolution runs on, its kernel by name: refused where it cannot run here."""
    try:
        found = DispatchTable((), (row,)).kernels[0]
    except KernelError as error:
        raise error.for_layer(name) from None
    assert isinstance(found, BitsConv)
    return ConvOfCodes(name, found, Prepared(found, weight), *others)


def run_conv(
    name: str, module: nn.Conv2d, low: LowBits, entry: LayerPlan, images: Images | None, terms: Terms
) -> tuple[Codes | None, LayerPlan]:
    """Choose what one convolution runs on; return it, None where floats serve, and the layer's plan."""
    geometry, widths = Geometry.of(module), low.widths
    size = images or _unseen(geometry)
    reasons = {row: row.refuses(geometry, widths.levels, low.range(module, name), size) for row in bits_conv_rows()}
    fitting = [row for row, reason in reasons.items() if reason is None]
    if module.weight.dtype is not torch.float32 or not fitting:
        here = next((reason for row, reason in reasons.items() if row.unavailable() is None and reason), None)
        why = here or f"its weight is {module.weight.dtype}, the kernels of convolutions take float32"
        return None, replace(entry, reason=f"dense: {widths.name}: {why}; {IN_FLOATS}")
    fastest = [
        widest([row for row in fitting if row.layout == layout])[0] for layout in {row.layout for row in fitting}
    ]
    rows = sorted(fastest, key=lambda row: row.name)
    runs = {row.name: Codes.of(module, partial(ConvOfCodes.of, name, module, row, size)) for row in rows}
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
        return None, replace(entry, reason=f"dense: {widths.name}: floats are faster here; {IN_FLOATS}")
    return runs[best], _described(entry, runs[best].product, seconds, widths.name, terms.cache.origin([key]))


def _unseen(geometry: Geometry) -> Images:
    reach = [geometry.dilation[i] * (geometry.kernel[i] - 1) + 1 for i in range(2)]
    return 1, max(UNSEEN, reach[0]), max(UNSEEN, reach[1])


def _described(entry: LayerPlan, runs: ConvOfCodes, seconds: dict[str, float], widths: str, origin: str) -> LayerPlan:
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
        bytes_after=runs.prepared.nbytes,
        times={tokens: {key: found for key, found in seconds.items() if key != _FLOATS}},
    )
