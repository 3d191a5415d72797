"""What a layer of low bits carries: its widths, its learned steps, and the whole numbers that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from twofour.errors import QuantizationError
from twofour.kernels.quantization import Quantization
from twofour.layers import CARRIED
from twofour.layers.modules import named_modules
from twofour.quantization.straight_through import by_sign, nearest, scaled_gradient, straight
from twofour.quantization.widths import Widths

TITLE = "low bits"

WEIGHT_STEP, INPUT_STEP, INPUT_ZERO = "weight_step", "input_step", "input_zero"
"""What a layer's steps are called: parameters (out,) and (), and the whole number that stands for zero, a buffer ()."""

TINY = torch.finfo(torch.float32).tiny
"""Least step, the smallest normal float32, as in kernels/quantization.py."""


@dataclass
class LowBits:
    """How one layer computes.

    Attributes:
        widths: Encodings of weight and inputs.
        static: Whether inputs have one learned step; else each token (of a convolution each image) has its own range.
        whole: Whether sums are made in 64-bit whole numbers: the reference.
        runs: What a compiled model runs in place of floats outside training: (layer, inputs) -> answer, None for inputs
            that it does not take.
    """

    widths: Widths
    static: bool
    whole: bool = False
    runs: Callable[[nn.Module, Tensor], Tensor | None] | None = field(default=None, repr=False, compare=False)
    title: ClassVar[str] = TITLE

    def weight(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the weight in whole numbers, float32 of its shape, and its scales (out,), both with gradients.

        Learned steps: w / s, cut and rounded (Esser et al. 2020, "Learned Step Size Quantization", arXiv 1902.08153,
        equations 1 to 3), the gradient of s scaled by 1 / sqrt(n q), n weights a step, q the largest level. One bipolar
        bit: s = mean |w| (Rastegari et al. 2016), gradients through the sign where |w| <= 1 (Hubara et al. 2016,
        arXiv 1602.02830, section 1.3). Ternary: s = mean |w| of the values that are not zero, and the gradient passes
        as it is (Ma et al. 2024, arXiv 2402.17764).
        """
        weight, encoding = cast(Tensor, module.weight).float(), self.widths.weights
        rows = weight.flatten(1)
        if encoding.levels == "ternary":
            held = rows.detach()
            scale = (held.abs().sum(1) / (held != 0).sum(1).clamp(min=1)).clamp(min=TINY)
            return straight(weight / _over(scale, weight), encoding.nearest), scale
        if encoding.name == "b1":
            return by_sign(weight), rows.abs().mean(1).clamp(min=TINY)
        most = encoding.bounds[1]
        step = scaled_gradient(cast(Tensor, module.weight_step), (rows.shape[1] * most) ** -0.5)
        step = step.abs().clamp(min=TINY)
        return nearest(weight / _over(step, weight), encoding.nearest, *encoding.bounds), step

    def input(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs in whole numbers less their zero point, and their scales, which multiply over the answer.

        A static step is learned: where an input lies beyond the levels its gradient goes to the step alone, which is
        the clipping of Choi et al. 2018 ("PACT", arXiv 1805.06085, equation 3), else as in `weight`. A token that holds
        NaN has NaN for its answer, without a static step one that holds an infinity too.
        """
        encoding = self.widths.inputs
        assert encoding is not None
        least, most = encoding.bounds
        if self.static:
            count = x[0].numel() if isinstance(module, nn.Conv2d) else x.shape[-1]
            step = scaled_gradient(cast(Tensor, module.input_step), (max(count, 1) * max(most, 1)) ** -0.5)
            step, zero = step.abs().clamp(min=TINY), cast(Tensor, module.input_zero)
            return nearest(x * (1 / step), self._round(), least - zero, most - zero), step
        scale, zero = self._spread(x.detach(), images=isinstance(module, nn.Conv2d))
        return nearest(x * (1 / scale), self._round(), least - zero, most - zero), scale

    def _round(self) -> Callable[[Tensor], Tensor]:
        """Return how quotients become levels, as kernels/quantization.py does: bipolar halves go up."""
        encoding = self.widths.inputs
        assert encoding is not None
        if encoding.levels != "bipolar":
            return torch.round
        return lambda t: (t * 0.5 + 2.0 ** (encoding.bits - 1)).floor() * 2 - encoding.largest_code

    def _spread(self, x: Tensor, images: bool) -> tuple[Tensor, Tensor]:
        """Return scale and zero point of each token or image, by the formulas of `kernels.quantization`."""
        encoding = self.widths.inputs
        assert encoding is not None
        axes = tuple(range(x.ndim - 3, x.ndim)) if images else (-1,)
        low, high = x.amin(axes, keepdim=True).clamp(max=0), x.amax(axes, keepdim=True).clamp(min=0)
        finite = torch.isfinite(low) & torch.isfinite(high)
        if encoding.levels == "unsigned":
            scale = ((high - low) / encoding.largest_code).clamp(min=TINY)
            zero = torch.where(finite, (-low / scale).nan_to_num().round(), 0.0)
        else:
            scale = (torch.maximum(-low, high) / encoding.bounds[1]).clamp(min=TINY)
            zero = torch.zeros_like(scale)
        return torch.where(finite, scale, torch.nan), zero

    def whole_weight(self, module: nn.Module, name: str = "") -> tuple[Tensor, Tensor]:
        """Return the weight's whole numbers, int16 of its shape, and float32 scales (out,).

        Raises:
            QuantizationError: A step is zero, NaN or infinite, or a weight is not finite.
        """
        with torch.no_grad():
            self.require_steps(module, name)
            whole, scales = self.weight(module)
            if not bool(torch.isfinite(whole).all()):
                raise QuantizationError(
                    "the weight holds NaN or infinity",
                    got=f"{int((~torch.isfinite(whole)).sum())} values without a level",
                    wanted="finite weights",
                    remedy="look for a diverged training run",
                    layer=name or None,
                )
            return whole.to(torch.int16), scales.contiguous()

    def range(self, module: nn.Module) -> Quantization:
        """Return how kernels round the inputs to the same whole numbers as `input`."""
        if not self.static:
            return self.widths.range()
        step = cast(Tensor, module.input_step).detach().abs().clamp(min=TINY)
        return self.widths.range(step.item(), int(cast(Tensor, module.input_zero).item()))

    def require_steps(self, module: nn.Module, name: str = "") -> None:
        """Refuse steps that scale nothing.

        Raises:
            QuantizationError: One is zero, NaN or infinite.
        """
        for what in (WEIGHT_STEP, INPUT_STEP):
            step = module._parameters.get(what)
            if step is not None and not bool((torch.isfinite(step) & (step.abs() >= TINY)).all()):
                raise QuantizationError(
                    f"a step of the layer is no scale: `{what}`",
                    got=f"{step[~(torch.isfinite(step) & (step.abs() >= TINY))][0].item()}",
                    wanted="finite steps other than zero",
                    remedy="train at a smaller learning rate, or quantize the model anew",
                    layer=name or None,
                )


def _over(scale: Tensor, weight: Tensor) -> Tensor:
    """Return scales (out,) with the axes of a weight (out, ...)."""
    return scale.view(-1, *(1,) * (weight.ndim - 1))


def held_by(module: nn.Module) -> LowBits | None:
    """Return what makes a layer one of low bits, None where it is none."""
    found = module.__dict__.get(CARRIED)
    return found if isinstance(found, LowBits) else None


def of(model: nn.Module) -> dict[str, LowBits]:
    """Return the layers of low bits of a model by name."""
    found = {name: held_by(module) for name, module in named_modules(model)}
    return {name: held for name, held in found.items() if held is not None}
