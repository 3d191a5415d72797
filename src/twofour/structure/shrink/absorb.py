"""absorbed: a cut after which channels that were the same number everywhere go on in the biases of what read them.

A batch norm whose scale is zero gives its shift, whatever comes in; past a ReLU or GELU that is a constant, and a layer
that reads it gets the constant times its weights as a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

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
class Seen:
    """The least and the largest value of each channel that a layer read, over how many places."""

    low: Tensor
    high: Tensor
    places: int

    @property
    def constant(self) -> Tensor:
        """(channels,) booleans: which are one number all over; none where one place shows nothing."""
        largest = torch.maximum(self.high.abs(), self.low.abs()).max()
        return (self.high - self.low <= SAME * largest) & (self.places > 1)

    def joined(self, other: Seen) -> Seen:
        """Return what was seen in both."""
        low, high = torch.minimum(self.low, other.low), torch.maximum(self.high, other.high)
        return Seen(low, high, self.places + other.places)


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
        ShrinkError: The plan is not one of the model, the model does not run on the example, or what reads a constant
            that goes has no bias that could take it up: a transposed or grouped convolution, a recurrent layer, a tied
            weight.
    """
    require_fit(model, plan)
    readers = _readers(model, plan)
    seen = inputs_seen(model, [weight for weight in readers if _shows_input(weight)], example)
    for weight in readers:
        if weight.name in seen and not absorbs(weight):
            _require_nothing_lost(weight, _gone(weight, plan), seen[weight.name])
    weights = [weight for weight in readers if absorbs(weight)]
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


@torch.no_grad()
def left_open(model: nn.Module, plan: Cut, example: Any) -> tuple[str, ...]:
    """Return the weights of which a cut takes columns that count: no zeros, and no constants that `absorbed` takes up.

    Args:
        model: The large model.
        plan: One of the model.
        example: As for `absorbed`.

    Raises:
        ShrinkError: The plan is not one of the model, or the model does not run on the example.
    """
    require_fit(model, plan)
    gone: dict[str, Tensor] = {}
    counting: list[PrunableWeight] = []
    for weight in _readers(model, plan):
        columns = _gone(weight, plan)
        if bool(columns.any()):
            gone[weight.name] = columns
            counting.append(weight)
    seen = inputs_seen(model, [weight for weight in counting if absorbs(weight)], example) if counting else {}
    closed = {name for name, one in seen.items() if bool((one.constant | ~gone[name]).all())}
    return tuple(name for name in gone if name not in closed)


def _readers(model: nn.Module, plan: Cut) -> list[PrunableWeight]:
    """Return the weights that a plan takes columns from, those of layers that go left out."""
    kept = plan.kept
    return [
        weight
        for weight in walk(model, eligibility="any", tied="*", empty=True).weights
        if any((name, weight.axis.axis) in kept for name in weight.names)
        and not any(weight.layer == layer or weight.layer.startswith(f"{layer}.") for layer in plan.layers)
    ]


def _gone(weight: PrunableWeight, plan: Cut) -> Tensor:
    """Return (positions of the reduction axis,) booleans: which columns go that are not zero."""
    axis, kept = weight.axis.axis, plan.kept
    columns = torch.ones(weight.parameter.shape[axis], dtype=torch.bool, device=weight.parameter.device)
    columns[list(next(kept[name, axis] for name in weight.names if (name, axis) in kept))] = False
    return columns & weight.parameter.detach().movedim(axis, 0).flatten(1).ne(0).any(1)


def _shows_input(weight: PrunableWeight) -> bool:
    """Whether a weight multiplies the first argument of its layer, and that alone."""
    return [feed.argument for feed in weight.feeds] == [0]


def _require_nothing_lost(weight: PrunableWeight, gone: Tensor, seen: Seen) -> None:
    """Refuse to lose constants that go on in a layer which has no bias that could take them up."""
    lost = gone.repeat(len(seen.low) // len(gone)) & seen.constant & (seen.low != 0)  # of a grouped convolution
    if bool(lost.any()):
        raise ShrinkError(
            "a constant that goes cannot be taken up by a bias",
            got=f"{int(lost.sum())} channels that are one number all over, in a layer of the kind {weight.kind}"
            + (f", whose weight is `{weight.aliases[0]}` too" if weight.aliases else ""),
            wanted="a Linear or a convolution without groups, whose weight is its own",
            remedy="keep these channels; or cut(model, plan), which loses the constants, and train afterwards",
            layer=weight.layer,
        )


def absorbs(weight: PrunableWeight) -> bool:
    """Whether constants among the inputs of a weight can be taken up by the bias of its layer."""
    return weight.kind in KINDS and getattr(weight.module, "groups", 1) == 1 and not weight.aliases


def inputs_seen(model: nn.Module, weights: Sequence[PrunableWeight], example: Any) -> dict[str, Seen]:
    """Run a model on an example and return what the layers of some weights read, by the weights' names.

    Raises:
        ShrinkError: The model does not run on the example.
    """
    found: dict[str, Seen] = {}

    def see(weight: PrunableWeight, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = calls.first_input(args, kwargs)
        x = x.data if isinstance(x, PackedSequence) else x
        axis = 1 - weight.parameter.ndim if weight.kind.startswith("conv") else -1  # there may be no batch
        rows = x.movedim(axis, 0).flatten(1)
        one = Seen(rows.amin(1), rows.amax(1), rows.shape[1])
        found[weight.name] = found[weight.name].joined(one) if weight.name in found else one

    observed = calls.observing([(weight, weight.module) for weight in weights], see)
    explained = calls.explaining(ShrinkError, "the example", wanted=calls.FORMS, remedy="call the model on it yourself")
    with explained, calls.evaluating(model), calls.without_cache(model), observed:
        calls.Example.of(example).run(model)
    return found


def _shift(weight: PrunableWeight, plan: Cut, seen: Seen) -> Tensor | None:
    """Return what the constants among the channels that go give to each output, None where nothing is known of them."""
    axis = weight.axis.axis
    size = weight.parameter.shape[axis]
    if seen.places < 2 or len(seen.low) != size:  # one place shows nothing; a grouped convolution reads others
        return None
    gone = torch.ones(size, dtype=torch.bool, device=seen.low.device)
    gone[list(plan.kept[weight.name, axis])] = False
    values = torch.where(gone & seen.constant, (seen.low + seen.high) / 2, torch.zeros_like(seen.low))
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
