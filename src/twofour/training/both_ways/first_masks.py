"""Which masks a training both ways starts with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from twofour import masks
from twofour.errors import PatternError, TrainingError
from twofour.layers import PrunableWeight
from twofour.patterns import Transposable

PATTERN = Transposable()


def first_masks(model: nn.Module, weights: Sequence[PrunableWeight]) -> dict[str, Tensor]:
    """Return the masks to start with: those the model has, or the largest magnitudes.

    Raises:
        PatternError: A weight without a mask holds NaN or infinity.
    """
    return best_masks(weights, {name: mask.keep for name, mask in masks.of(model).items()})


def require_full(chosen: Mapping[str, Tensor]) -> None:
    """Refuse masks that keep fewer than two values of some four: a packed weight has room for two, which would learn.

    Raises:
        TrainingError: One does.
    """
    for name, keep in chosen.items():
        if short := keep.numel() // 2 - int(keep.sum()):
            raise TrainingError(
                "a mask keeps fewer values than the packed form has",
                got=f"{short} values short of two in every four",
                wanted="two of every four along both axes, exactly",
                remedy='both_ways.attach(..., state="dense"), or let go with twofour.masks.detach(model)',
                layer=name,
            )


def require_masked(unmasked: Sequence[str]) -> None:
    """Refuse layers without a mask where all hold kept values alone: half of their values would be lost.

    Raises:
        TrainingError: There are some.
    """
    if unmasked:
        raise TrainingError(
            "the interrupted run had layers without a mask, which have no kept values",
            got=f"{len(unmasked)} layers none of whose products gained from 2:4 there, the first `{unmasked[0]}`",
            wanted="a mask of every layer",
            remedy='go on with both_ways.attach(..., state="dense"), as it was taken; or finish() that run, prune its '
            'model "2:4-transposable" and attach that',
        )


def best_masks(weights: Sequence[PrunableWeight], have: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the masks of the largest magnitudes, where there are none to `have`."""
    chosen = {}
    for weight in weights:
        try:
            if (keep := have.get(weight.name)) is None:
                scores = weight.axis.last(weight.parameter.detach())
                keep = weight.axis.restore(PATTERN.project(scores, absolute=True))
        except PatternError as error:
            raise error.for_layer(weight.name) from None
        chosen[weight.name] = keep
    return chosen
