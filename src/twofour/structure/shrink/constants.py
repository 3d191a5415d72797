"""absorbed: a cut after which channels that were the same number everywhere go on in the biases of what read them.

A batch norm whose scale is zero gives its shift, whatever comes in; past a ReLU or GELU that is a constant, and a layer
that reads it gets the constant times its weights as a bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls
from twofour.errors import ShrinkError
from twofour.layers import PrunableWeight, walk
from twofour.structure.shrink.cut import Cut
from twofour.structure.shrink.surgery import cut, require_fit

SAME = 1e-6
"""Largest spread of a constant, relative to the largest value that its layer reads."""

KINDS = ("linear", "hf_conv1d", "conv1d", "conv2d", "conv3d")
"""Kinds of layers that constants are absorbed in."""


@dataclass(eq=False)
class _Seen:
    """The least and the largest value of each channel that a layer read, over how many places."""

    low: Tensor
    high: Tensor
    places: int


@torch.no_grad()
def absorbed(model: nn.Module, plan: Cut, example: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """Cut a model as `cut` does, and let biases take up the constants of the channels that go.

    Args:
        model: The large model; it stays as it is.
        plan: What is cut.
        example: Input of one forward pass, two samples or more: what is one number all over it counts as constant.

    Returns:
        The small model, which computes what the large one does where all that was cut is constant; and the layers in
        which that holds away from the borders alone, because they pad with zeros, which a bias cannot.

    Raises:
        ShrinkError: The plan is not one of the model, or the model does not run on the example.
    """
    require_fit(model, plan)
    weights = [w for w in walk(model, eligibility="any", tied="*", empty=True).weights if w.kind in KINDS]
    seen = _seen(model, [w for w in weights if (w.name, w.axis.axis) in plan.kept], example)
    shifts: dict[str, Tensor] = {}
    bordered: list[str] = []
    for weight in weights:
        shift = _shift(weight, plan, seen[weight.name]) if weight.name in seen else None
        if shift is not None and bool(shift.any()):
            shifts[weight.layer] = _kept_rows(weight, plan, shift)
            if any(_padding(weight.module)):
                bordered.append(weight.layer)
    modules = dict(model.named_modules())
    biases = [name for name in shifts if getattr(modules[name], "bias", None) is None]
    small = cut(model, replace(plan, layers=(), biases=(*plan.biases, *biases)))
    for name, shift in shifts.items():
        bias = small.get_submodule(name).bias
        assert isinstance(bias, Tensor)
        bias += shift.to(bias)
    if plan.layers:  # last: layers that follow move up and have other names then
        cut(small, Cut(layers=plan.layers), inplace=True)
    return small, tuple(bordered)


def _seen(model: nn.Module, weights: list[PrunableWeight], example: Any) -> dict[str, _Seen]:
    found: dict[str, _Seen] = {}

    def see(weight: PrunableWeight, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = calls.first_input(args, kwargs)
        rows = x.movedim(1 if weight.kind.startswith("conv") else -1, 0).flatten(1)
        low, high = rows.amin(1), rows.amax(1)
        if weight.name in found:
            old = found[weight.name]
            low, high = torch.minimum(low, old.low), torch.maximum(high, old.high)
        found[weight.name] = _Seen(low, high, rows.shape[1])

    observed = calls.observing([(weight, weight.module) for weight in weights], see)
    explained = calls.explaining(ShrinkError, "the example", wanted=calls.FORMS, remedy="call the model on it yourself")
    with explained, calls.evaluating(model), calls.without_cache(model), observed:
        calls.Example.of(example).run(model)
    return found


def _shift(weight: PrunableWeight, plan: Cut, seen: _Seen) -> Tensor | None:
    """Return what the constants among the channels that go give to each output, None where nothing is known of them."""
    axis = weight.axis.axis
    size = weight.parameter.shape[axis]
    if seen.places < 2 or len(seen.low) != size:  # one place shows nothing; a grouped convolution reads others
        return None
    gone = torch.ones(size, dtype=torch.bool, device=seen.low.device)
    gone[list(plan.kept[weight.name, axis])] = False
    largest = torch.maximum(seen.high.abs(), seen.low.abs()).max()
    constant = gone & (seen.high - seen.low <= SAME * largest)
    values = torch.where(constant, (seen.low + seen.high) / 2, torch.zeros_like(seen.low))
    taps = weight.parameter.detach().movedim(axis, 0).flatten(2) if weight.parameter.ndim > 2 else None
    matrix = taps.sum(2) if taps is not None else weight.parameter.detach().movedim(axis, 0)
    return values @ matrix


def _kept_rows(weight: PrunableWeight, plan: Cut, shift: Tensor) -> Tensor:
    kept = plan.kept.get((weight.name, 1 - weight.axis.axis))
    return shift if kept is None else shift[list(kept)]


def _padding(module: Any) -> tuple[int, ...]:
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return ()
    return tuple(getattr(module, "_reversed_padding_repeated_twice", ()))
