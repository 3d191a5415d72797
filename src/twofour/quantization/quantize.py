"""quantize: a model of floats in, the same model computing in 1 to 8 bits out, ready to use and to train."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor, nn

from twofour import masks
from twofour.calibration import take
from twofour.errors import QuantizationError, integer_from, one_of
from twofour.layers import (
    compiled_parts,
    describe_attached,
    kind_of,
    matches,
    obstacle,
    parse_globs,
    require_matches,
    require_unwrapped,
)
from twofour.packing import encodings
from twofour.packing.encodings import WIDEST, Bits
from twofour.patterns.base import is_finite
from twofour.quantization.carried import INPUT_STEP, INPUT_ZERO, WEIGHT_STEP, WEIGHT_ZERO, LowBits, of, require_steps
from twofour.quantization.layer import give_low_bits, take_low_bits
from twofour.quantization.observe import Seen, observe
from twofour.quantization.steps import input_step, weight_steps, width_of
from twofour.quantization.widths import Rules, Widths

_log = logging.getLogger("twofour.quantization")

FEWEST = 3
"""Layers that a model has at least where the first and the last of them are its ends."""


def quantize(
    model: nn.Module,
    weights: str | Mapping[str, str] = "w2",
    activations: str | Mapping[str, str] | None = None,
    *,
    data: Any = None,
    samples: int = 128,
    skip: str | Sequence[str] = (),
    ends: int | None = WIDEST,
    scales: Literal["channel", "tensor"] = "channel",
    group: int | None = None,
    symmetric: bool = True,
) -> nn.Module:
    """Let the Linear and Conv2d layers of a model compute in 1 to 8 bits, in place; returns the model.

    It is usable at once: steps are those of the least squared error. It learns by your own loop or by `finetune`:
    weights and inputs are rounded in the forward pass, gradients go straight through, and the steps are parameters of
    the layers (`weight_step`, `input_step`), so build the optimiser afterwards. Masks stay, and what they prune stays
    exactly zero. `compile(model, example)` runs it in its own widths. Biases, norms and everything between the layers
    stay floats. An error leaves the model as it was.

    Args:
        model: A trained model, masked or not, on any device.
        weights: "w1" (-1 and 1 times the mean magnitude of each output), "w1.58" (-1, 0 and 1), "w2" to "w8" (two's
            complement, learned steps), an encoding ("b3", "ternary5"), or a mapping from globs of layers to those or
            "float"; the first that matches decides.
        activations: "a1" to "a8" (unsigned with a zero point), an encoding ("s4", "b1"), or a mapping; None or "float":
            weights alone. A layer whose weight stays float keeps float inputs.
        data: Inputs, or pairs (input, target), as `prune` takes them: each layer's inputs get one step, found on them
            and learned on from there. Without, every token (of a convolution every image) gets its own range.
        samples: How many samples of `data` to use.
        skip: Globs of layers to leave as they are.
        ends: Bits of weights and inputs of the first and of the last layer, in the model's own order, of three or more;
            None: those of the others. A rule that names a layer by more than "*" stands above it.
        scales: Of weights: one an output channel, or one a weight, learned or found as that.
        group: Inputs of a Linear that share a scale of its weight, such as 32, 64 or 128, a divisor of them all; None:
            all of an output. Convolutions have one an output.
        symmetric: False: weights of two's complement ("w2" to "w8") have a zero point beside each scale, by the range
            from their least to their greatest value and zero.

    Example:
        >>> model = twofour.quantize(model, weights="w2", activations="a2", data=loader)
        >>> ...  # your own training loop, a few epochs at a small learning rate
        >>> fast = twofour.compile(model, example)

    Raises:
        QuantizationError: A width means nothing, a layer's sums could exceed 32 bits, levels without a zero are asked
            for under a mask, a weight is not finite, something is attached to the model, or no layer is left.
        DataError: The data cannot be used, or are not finite in a layer.
    """
    require_unwrapped(model, QuantizationError)
    _require_free(model)
    integer_from(1, "`samples` cannot be used", QuantizationError, "leave it out to use 128", samples=samples)
    one_of("the scales are not known", scales, ("channel", "tensor"), QuantizationError, 'scales="channel"')
    one_of("`symmetric` is no truth value", symmetric, (True, False), QuantizationError, "False adds zero points")
    if group is not None:
        integer_from(1, "`group` cannot be used", QuantizationError, "group=64, or leave it out", group=group)
    chosen = _chosen(model, weights, activations, parse_globs(skip, kind=QuantizationError), ends)
    runs = {name: _run(model, name, widths, group, bool(symmetric), scales) for name, widths in chosen.items()}
    seen: dict[str, Seen] = {}
    if data is not None:
        reading = [name for name, widths in chosen.items() if widths.inputs is not None]
        seen = observe(model, reading, take(model, data, samples))
        if unseen := [name for name in reading if name not in seen or not seen[name].high > seen[name].low]:
            _log.warning(
                "`data` show no range of inputs to %s: these layers find one for each token, and have no step that is "
                "learned; give data that reach them",
                ", ".join(unseen),
            )
    layers = {
        name: LowBits(widths, _is_static(widths, seen.get(name)), *runs[name], scales == "tensor", name=name)
        for name, widths in chosen.items()
    }
    steps = {name: _steps(model.get_submodule(name), held, seen.get(name)) for name, held in layers.items()}
    for name, held in layers.items():
        give_low_bits(model.get_submodule(name), held, steps[name])
    return model


def remove(model: nn.Module) -> nn.Module:
    """Let the layers compute in floats again, on the weights as they were trained; returns the model.

    Raises:
        QuantizationError: The model has no layer of low bits, or is compiled.
    """
    if parts := compiled_parts(model):
        raise QuantizationError(
            "a compiled model has codes in the place of its float weights",
            got=parts,
            wanted="the model that it was compiled from",
            remedy="take low bits off that one, and compile it again",
        )
    found = of(model)
    if not found:
        raise _nothing(model, ["it computes in floats already"])
    for name in found:
        take_low_bits(model.get_submodule(name))
    return model


def _require_free(model: nn.Module) -> None:
    if found := compiled_parts(model):
        raise QuantizationError(
            "a compiled model cannot be quantised",
            got=found,
            wanted="the model that it was compiled from",
            remedy="quantise that one and compile again",
        )
    if found := describe_attached(model):
        raise QuantizationError(
            "something is attached to the model already",
            got=found,
            wanted="a plain or masked model",
            remedy="call finish() of that scheme first, or twofour.quantization.remove(model) to choose other widths",
        )


def _chosen(
    model: nn.Module, weights: object, activations: object, skip: tuple[str, ...], ends: int | None
) -> dict[str, Widths]:
    """Return the widths of each layer that is to have some, in the model's order."""
    require_matches(model, skip, "a glob in `skip`", QuantizationError)
    if ends is not None:
        integer_from(2, "`ends` is no width", QuantizationError, "ends=8, or None", WIDEST, ends=ends)
    of_weights, of_inputs = Rules.parse(weights, "weights", model), Rules.parse(activations, "activations", model)
    found: dict[str, tuple[Widths, bool]] = {}
    reasons, unable = list[str](), list[str]()
    for name, module in model.named_modules():
        if kind_of(module) is None:
            continue
        encoding, named = of_weights.find(name)
        inputs, named_inputs = of_inputs.find(name)
        why = _reason(model, name, module, skip) or ("no rule gives it a width" if encoding is None else None)
        if why is None and encoding is not None:
            found[name] = Widths(encoding, inputs), named or named_inputs
        else:
            reasons.append(f"`{name or type(module).__name__}`: {why}")
            _log.info("%s; it stays float", reasons[-1])
            if encoding is not None and not any(matches(glob, name) for glob in skip):
                unable.append(reasons[-1])
    if not found:
        raise _nothing(model, reasons)
    if unable:
        listed, count = "; ".join(unable[:3]) + "; ..." * (len(unable) > 3), len(unable)
        _log.warning("%d of %d layers stay in floats: %s", count, count + len(found), listed)
    return _with_ends(found, ends)


def _with_ends(found: Mapping[str, tuple[Widths, bool]], ends: int | None) -> dict[str, Widths]:
    """Return the widths, the first and the last layer's wider unless a rule names them."""
    chosen = {name: widths for name, (widths, _) in found.items()}
    if ends is None or len(found) < FEWEST:
        return chosen
    for name in (next(iter(found)), list(found)[-1]):
        widths, named = found[name]
        if not named:
            chosen[name] = Widths(
                _wider(widths.weights, f"s{ends}"), None if widths.inputs is None else _wider(widths.inputs, f"u{ends}")
            )
    return chosen


def _wider(encoding: Bits, name: str) -> Bits:
    other = encodings.get(name)
    assert isinstance(other, Bits), name
    return other if encoding.bits < other.bits or encoding.levels == "ternary" else encoding


def _reason(model: nn.Module, name: str, module: nn.Module, skip: Sequence[str]) -> str | None:
    """Return why a layer stays as it is, None where it need not."""
    if any(matches(glob, name) for glob in skip):
        return "named in `skip`"
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return f"{type(module).__name__}: low bits are for Linear and Conv2d"
    around = name.split(".")[:-1]
    outer = [model.get_submodule(".".join(around[:end])) for end in range(len(around) + 1)]
    if any(isinstance(part, nn.MultiheadAttention) for part in outer):
        return "inside nn.MultiheadAttention, which reads the weight without calling the layer"
    if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
        return f"padding_mode {module.padding_mode!r}: sums are of zeros beside the image"
    if why := obstacle(module, accepted=("hooks",)):
        return why
    weight = module.weight
    if not weight.is_floating_point() or weight.is_meta or not weight.numel():
        return f"its weight has no values to round: {weight.dtype} {tuple(weight.shape)} on {weight.device}"
    return None


def _require_fit(model: nn.Module, name: str, widths: Widths, group: int, shifted: bool) -> None:
    """Refuse what a layer cannot compute in these widths: a sum is of a group, of weights less their zero points."""
    module = model.get_submodule(name)
    count, weight, longest = group or width_of(module), module.weight, widths.longest(shifted=shifted)
    assert isinstance(weight, Tensor)
    if not is_finite(weight.detach()):
        raise QuantizationError(
            "the weight holds NaN or infinity",
            got=f"{int((~torch.isfinite(weight)).sum())} such values",
            wanted="finite weights",
            remedy="look for a diverged training run or a broken checkpoint",
            layer=name,
        )
    by_mean = widths.weights.name == "b1" or widths.weights.levels == "ternary"
    if by_mean and not bool(weight.detach().float().abs().sum().isfinite()):
        raise QuantizationError(
            "the mean of the weight's magnitudes cannot be found",
            got=f"magnitudes up to {float(weight.detach().abs().max()):.1e}",
            wanted="magnitudes whose sum float32 holds",
            remedy='a learned step has no mean: weights="w2"',
            layer=name,
        )
    if count > longest:
        raise QuantizationError(
            f"the sums of a layer of {widths.name} could exceed 32 bits",
            got=f"{count} products a sum",
            wanted=f"at most {longest}",
            remedy="fewer bits in this layer, groups of a Linear (group=64), or leave it out: skip=[...]",
            layer=name,
        )
    if not widths.weights.has_zero and f"{name}.weight".lstrip(".") in masks.of(model):
        raise QuantizationError(
            f"a masked weight cannot be written as {widths.weights.name}",
            got=f"{widths.weights.name} has no zero, and the mask has",
            wanted="levels with a zero, so that what is pruned stays exactly zero",
            remedy='weights="w1.58" (-1, 0, 1), or "w2" to "w8"; twofour.masks.detach(model) lets the masks go',
            layer=name,
        )


def _run(
    model: nn.Module, name: str, widths: Widths, group: int | None, symmetric: bool, scales: str
) -> tuple[int, bool]:
    """Return the inputs that share a scale of a layer, 0 for all, and whether its weight has zero points.

    Raises:
        QuantizationError: Groups do not divide the layer, its levels have no zero points, or it does not fit them.
    """
    module = model.get_submodule(name)
    size = group or 0 if isinstance(module, nn.Linear) else 0
    shifted = not symmetric and widths.weights.levels == "twos"
    wrong = size and (module.in_features % size or scales == "tensor")  # pyright: ignore[reportOperatorIssue]
    if wrong or shifted is symmetric:
        fit = 'scales="channel"' if scales == "tensor" else f"group={gcd(width_of(module), 128)}"
        raise QuantizationError(
            "the weight of a layer cannot be cut into groups" if wrong else f"{widths.weights.name} has no zero points",
            got=f"group={group}, {width_of(module)} inputs, scales={scales!r}" if wrong else "symmetric=False",
            wanted="a divisor of its inputs, and a scale for each" if wrong else "two's complement: w2 to w8",
            remedy=f"{fit}, or leave the layer out: skip=[...]" if wrong else "leave `symmetric` out",
            layer=name or None,
        )
    _require_fit(model, name, widths, size, shifted)
    return size, shifted


def _is_static(widths: Widths, seen: Seen | None) -> bool:
    return seen is not None and widths.inputs is not None and seen.high > seen.low


def _steps(module: nn.Module, held: LowBits, seen: Seen | None) -> dict[str, Tensor]:
    """Return the first steps of a layer.

    Raises:
        QuantizationError: One is infinite: float32 does not hold the range of a weight with zero points.
    """
    weight, widths, steps = module.weight, held.widths, dict[str, Tensor]()
    assert isinstance(weight, Tensor)
    size = (len(weight), -1) if held.group else (-1,)
    runs = held.runs_of(weight.detach())
    if held.shifted:
        _, scales, zeros = widths.weights.quantize(runs.float(), symmetric=False)
        assert scales is not None and zeros is not None
        steps |= {WEIGHT_STEP: scales.view(size), WEIGHT_ZERO: zeros.view(size)}
    elif held.learned:
        steps[WEIGHT_STEP] = weight_steps(runs, widths.weights).view(size)
    if held.static:
        assert seen is not None and widths.inputs is not None
        step, zero = input_step(seen.sample, seen.low, seen.high, widths.inputs)
        found = zip((INPUT_STEP, INPUT_ZERO), (step, float(zero)), strict=True)
        steps |= {name: torch.tensor(value, dtype=torch.float32, device=weight.device) for name, value in found}
    require_steps(held, steps, held.name)
    return {name: step.to(weight.device) for name, step in steps.items()}


def _nothing(model: nn.Module, reasons: Sequence[str]) -> QuantizationError:
    return QuantizationError(
        "no layer can compute in low bits",
        reasons=list(reasons)[:16],
        got=type(model).__name__,
        wanted="a Linear or Conv2d that a rule gives a width and `skip` does not name",
        remedy="change what the reasons name",
    )
