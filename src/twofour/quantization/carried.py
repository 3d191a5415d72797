"""What a layer of low bits carries: its widths, its learned steps, and the whole numbers that they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from twofour.errors import QuantizationError
from twofour.kernels.bits_matmul import BitWeight
from twofour.kernels.quantization import Quantization, spread_over
from twofour.layers import CARRIED
from twofour.layers.modules import named_modules
from twofour.quantization.straight_through import by_sign, nearest, scaled_gradient, straight
from twofour.quantization.widths import Widths

TITLE = "low bits"

WEIGHT_STEP, INPUT_STEP, INPUT_ZERO = "weight_step", "input_step", "input_zero"
"""What a layer's steps are called: parameters (out,) and (), and the whole number that stands for zero, a buffer ().

The first is (1,) where a weight has one scale, and (out, groups) where groups of inputs have theirs.
"""

WEIGHT_SCALE = "weight_scale"
"""A buffer (out,): scales of a file, which stand in the place of the mean magnitude of weights without a step."""

WEIGHT_ZERO = "weight_zero"
"""A buffer of the shape of the scales: whole numbers that stand for zero."""

STEPS = (WEIGHT_STEP, INPUT_STEP, INPUT_ZERO, WEIGHT_SCALE, WEIGHT_ZERO)
"""What a layer of low bits has beside weight and bias."""

BUFFERS = (INPUT_ZERO, WEIGHT_SCALE, WEIGHT_ZERO)
"""Those of them that are not learned."""

TINY = torch.finfo(torch.float32).tiny
"""Least step, the smallest normal float32, as in kernels/quantization.py."""


class Runs(Protocol):
    """What a compiled model runs in place of floats outside training."""

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return the answer of a layer, None for inputs that it does not take."""
        ...

    def weight(self) -> BitWeight:
        """Return the weight (out, inputs) that it multiplies by."""
        ...


@dataclass
class LowBits:
    """How one layer computes.

    Attributes:
        widths: Encodings of weight and inputs.
        static: Whether inputs have one learned step; else each token (of a convolution each image) has its own range.
        group: Inputs of a Linear that share a scale of its weight; 0: all of an output.
        shifted: Whether weights have zero points, a whole number for each scale.
        per_tensor: Whether a weight has one scale, whose step is (1,), in the place of one an output.
        whole: Whether sums are made in 64-bit whole numbers, inside `in_whole_numbers`: no trait, and no copy has it.
        runs: What a compiled model runs; where the layer has no float weight beside it, its codes are the weight.
        name: Of the layer in the model that was quantised, for messages.
        sound: Tensors whose values were looked at and scale something (`stamps.Stamp`).
    """

    widths: Widths
    static: bool
    group: int = 0
    shifted: bool = False
    per_tensor: bool = False
    whole: bool = field(default=False, repr=False, compare=False)
    runs: Runs | None = field(default=None, repr=False, compare=False)
    name: str = field(default="", repr=False, compare=False)
    sound: tuple[tuple[Tensor | None, int], ...] = field(default=(), repr=False, compare=False)
    title: ClassVar[str] = TITLE

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "whole": False, "sound": ()}

    @property
    def said(self) -> str:
        """Widths, groups, zero points and ranges, as the text of a layer has them."""
        found = [f"widths={self.widths.name}"]
        found += [f"group={self.group}"] * bool(self.group) + ["symmetric=False"] * self.shifted
        found += ["scales='tensor'"] * self.per_tensor + ["learned input step"] * self.static
        return ", ".join(found)

    @property
    def keeps_zeros(self) -> bool:
        """Whether a weight of zero is the whole number zero: see `layers.attachments.keeps_zeros`."""
        return self.widths.weights.has_zero

    @property
    def learned(self) -> bool:
        """Whether the weight has a step that is learned; signs and ternary values have the mean of magnitudes."""
        return self.widths.weights.levels != "ternary" and self.widths.weights.name != "b1"

    def codes(self, module: nn.Module) -> BitWeight | None:
        """Return the codes that stand in the place of a compiled layer's float weight, None where it has that one."""
        return None if self.runs is None or module._parameters.get("weight") is not None else self.runs.weight()

    def zeros(self, module: nn.Module, like: Tensor) -> Tensor | None:
        """Return the zero points of a weight, float32 of the shape of its scales `like`, None without any."""
        if not self.shifted:
            return None
        codes = self.codes(module)
        held = module.weight_zero if codes is None else codes.zeros
        zeros = cast(Tensor, held).float()
        return zeros.expand_as(like) if self.per_tensor else zeros.view_as(like)

    def weight(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the weight in whole numbers less their zero points, float32 of its shape, and scales, with gradients.

        Scales are (out,), also where all outputs have one, or (out, groups) where groups of inputs have theirs.

        Learned steps: w / s, cut and rounded (Esser et al. 2020, "Learned Step Size Quantization", arXiv 1902.08153,
        equations 1 to 3), the gradient of s scaled by 1 / sqrt(n q), n weights a step, q the largest level. One bipolar
        bit: s = mean |w| (Rastegari et al. 2016), gradients through the sign where |w| <= 1 (Hubara et al. 2016,
        arXiv 1602.02830, section 1.3). Ternary: s = mean |w| of the values that are not zero, and the gradient passes
        as it is (Ma et al. 2024, arXiv 2402.17764). Scales of a file stand in the place of a mean.
        """
        if (codes := self.codes(module)) is not None:
            whole = codes.values().float()
            return (
                whole.unflatten(1, (-1, *module.kernel_size)) if isinstance(module, nn.Conv2d) else whole
            ), codes.scales
        weight = cast(Tensor, module.weight).float()
        whole, scale = self._rounded(module, self.runs_of(weight))
        scale = scale.expand(len(weight)) if self.per_tensor else scale
        return whole.view(weight.shape), scale.view(len(weight), -1) if self.group else scale

    def runs_of(self, weight: Tensor) -> Tensor:
        """Return the values (runs, n) of a weight (out, ...) that share a scale."""
        return weight.reshape(-1, weight.numel() if self.per_tensor else self.group or weight[0].numel())

    def _rounded(self, module: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return runs of weights (runs, n) in whole numbers less their zero points, and a scale for each run."""
        encoding, given = self.widths.weights, module._buffers.get(WEIGHT_SCALE)
        if given is not None:
            return nearest(rows / given.reshape(-1, 1), encoding.nearest, *encoding.bounds), given.flatten()
        if encoding.levels == "ternary":
            held = rows.detach()
            scale = (held.abs().sum(1) / (held != 0).sum(1).clamp(min=1)).clamp(min=TINY)
            return straight(rows / scale.unsqueeze(1), encoding.nearest), scale
        if encoding.name == "b1":
            return by_sign(rows), rows.abs().mean(1).clamp(min=TINY)
        least, most = encoding.bounds
        step = scaled_gradient(cast(Tensor, module.weight_step), (rows.shape[1] * most) ** -0.5)
        step = step.abs().clamp(min=TINY).flatten()
        if not self.shifted:
            return nearest(rows / step.unsqueeze(1), encoding.nearest, least, most), step
        zero = cast(Tensor, module.weight_zero).reshape(-1, 1)
        return nearest(rows / step.unsqueeze(1), torch.round, least - zero, most - zero), step

    def input(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs in whole numbers less their zero point, and their scales, which multiply over the answer.

        A static step is learned: where an input lies beyond the levels its gradient goes to the step alone, which is
        the clipping of Choi et al. 2018 ("PACT", arXiv 1805.06085, equation 3), else as in `weight`. A range that is
        found cuts nothing, so that every gradient passes. A token that holds NaN has NaN for its answer, without a
        static step one that holds an infinity too, or whose range float32 does not hold.
        """
        encoding = self.widths.inputs
        assert encoding is not None
        (least, most), rounded = encoding.bounds, self.round()
        if self.static:
            step, below, above = self.learned_range(module, x)
            return nearest(x * (1 / step), rounded, below, above), step
        scale, zero = self._spread(x.detach(), images=isinstance(module, nn.Conv2d))
        below, above = least - zero, most - zero
        return straight(x * (1 / scale), lambda t: torch.minimum(torch.maximum(rounded(t), below), above)), scale

    def learned_range(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the learned step of inputs, and their least and greatest whole number less the zero point."""
        encoding = self.widths.inputs
        assert encoding is not None and self.static
        (least, most), zero = encoding.bounds, cast(Tensor, module.input_zero)
        count = math.prod(x.shape[-3 if isinstance(module, nn.Conv2d) else -1 :])
        step = scaled_gradient(cast(Tensor, module.input_step), (max(count, 1) * max(most, 1)) ** -0.5)
        return step.abs().clamp(min=TINY), least - zero, most - zero

    def round(self) -> Callable[[Tensor], Tensor]:
        """Return how quotients become levels, as kernels/quantization.py does: bipolar halves go up."""
        encoding = self.widths.inputs
        assert encoding is not None
        if encoding.levels != "bipolar":
            return torch.round
        return lambda t: (t * 0.5 + 2.0 ** (encoding.bits - 1)).floor() * 2 - encoding.largest_code

    def _spread(self, x: Tensor, images: bool) -> tuple[Tensor, Tensor]:
        """Return scale and zero point of each token or image, which lies between the levels' bounds."""
        axes = tuple(range(x.ndim - 3, x.ndim)) if images else (-1,)
        range_of_x = self.widths.range()
        low, high = x.amin(axes, keepdim=True).clamp(max=0), x.amax(axes, keepdim=True).clamp(min=0)
        scale, zero = spread_over(low, high, range_of_x)
        return scale, (zero if range_of_x.levels == "unsigned" else torch.zeros_like(zero)).to(scale.dtype)

    def whole_weight(self, module: nn.Module, name: str = "") -> tuple[Tensor, Tensor]:
        """Return what `weight` does, whole numbers in int16, for good.

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

    def range(self, module: nn.Module, name: str = "") -> Quantization:
        """Return how kernels round the inputs to the same whole numbers as `input`.

        Raises:
            QuantizationError: A step is zero, NaN or infinite, or the zero point is no level.
        """
        if not self.static:
            return self.widths.range()
        self.require_steps(module, name)
        step = cast(Tensor, module.input_step).detach().abs().clamp(min=TINY)
        return self.widths.range(step.item(), int(cast(Tensor, module.input_zero).item()))

    def require_steps(self, module: nn.Module, name: str = "") -> None:
        """Refuse steps that scale nothing.

        Raises:
            QuantizationError: One is zero, NaN or infinite.
        """
        held = {what: module._parameters.get(what, module._buffers.get(what)) for what in STEPS}
        require_steps(self, {what: step for what, step in held.items() if step is not None}, name or self.name)


def require_steps(held: LowBits, steps: Mapping[str, Tensor], layer: str = "") -> None:
    """Refuse steps that scale nothing, and a zero point that stands for no level.

    Args:
        held: Of the layer.
        steps: Some of `STEPS` by name, of a layer or a file.
        layer: Its name, for messages.

    Raises:
        QuantizationError: A step is zero, NaN or infinite, or the zero point is not whole or beyond the levels.
    """
    inputs = held.widths.inputs
    most = inputs.largest_code if inputs is not None and inputs.levels == "unsigned" else 0
    for what, step in steps.items():
        if what == WEIGHT_ZERO:
            least, top = held.widths.weights.bounds
            good, wanted = (step >= least) & (step <= top) & (step == step.round()), f"whole numbers, {least} to {top}"
        elif what == INPUT_ZERO:
            good, wanted = (step >= 0) & (step <= most) & (step == step.round()), f"a whole number from 0 to {most}"
        else:
            good, wanted = torch.isfinite(step) & (step.abs() >= TINY), f"finite steps of magnitudes from {TINY:.1e}"
        if not bool(good.all()):
            raise QuantizationError(
                f"a step of the layer is no scale: `{what}`",
                got=f"{step[~good].flatten()[0].item()}",
                wanted=wanted,
                remedy="train at a smaller learning rate, or quantize the model anew",
                layer=layer or None,
            )


def over(scale: Tensor, weight: Tensor) -> Tensor:
    """Return scales (out,) or (out, groups) with the axes of a weight (out, ...)."""
    if scale.ndim == 2:
        return scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
    return scale.view(-1, *(1,) * (weight.ndim - 1))


def held_by(module: nn.Module) -> LowBits | None:
    """Return what makes a layer one of low bits, None where it is none."""
    found = module.__dict__.get(CARRIED)
    return found if isinstance(found, LowBits) else None


def of(model: nn.Module) -> dict[str, LowBits]:
    """Return the layers of low bits of a model by name."""
    found = {name: held_by(module) for name, module in named_modules(model)}
    return {name: held for name, held in found.items() if held is not None}
