"""Prune once: lay a recipe over a dense model, choose the masks, attach them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twofour import masks
from twofour.criteria import Criterion
from twofour.errors import LayerError, PatternError, RecipeError
from twofour.layers import PrunableWeight, compiled_parts, whole
from twofour.patterns import Pattern
from twofour.recipe import Assignment, Recipe

_log = logging.getLogger("twofour.pruning")


def prune(
    model: nn.Module,
    pattern: str | Pattern | Mapping[str, str | Pattern] | Recipe,
    *,
    criterion: str | Criterion = "magnitude",
    skip: str | Sequence[str] = (),
    eligibility: str = "asp",
    data: Any = None,
    permute: bool = False,
    example: Any = None,
) -> nn.Module:
    """Make a model sparse, in place: choose a mask for each eligible weight and keep the weight to it from now on.

    All masks are chosen before anything changes: an error leaves the model as it was. What stays dense is logged with
    its reason. Biases, norms and embeddings always stay dense (Mishra et al. 2021).

    Args:
        model: The trained dense model, on any device.
        pattern: "2:4" or another N:M for every eligible layer, a mapping from layer globs to patterns or "dense"
            (first match wins), or a `Recipe`.
        criterion: Which values of a group stay: "magnitude".
        skip: Globs of layers to leave dense.
        eligibility: "asp" prunes a weight only if size(0) % 8 == 0 and size(1) % 16 == 0; "any" prunes whatever the
            pattern's group divides.
        data: Planned: calibration data for criteria that need it.
        permute: Planned: search for an order of the input channels that the pattern fits better.
        example: Planned: an input to trace the model with, for `permute`.

    Returns:
        The same model.

    Example:
        >>> model = twofour.prune(model, "2:4", skip=["head"])

    Raises:
        LayerError: Nothing can be pruned, a rule asks for a layer that cannot be, or the model is compiled.
        PatternError: A pattern does not parse, or a weight holds NaN or infinity.
        RecipeError: A rule or option is malformed, planned, or matches no layer.
        MaskError: A layer already carries a mask that is not ours.
    """
    if not isinstance(model, nn.Module):
        remedy = "build the model first; the command line takes files: twofour prune SOURCE"
        raise LayerError(
            "there is no model to prune", got=type(model).__name__, wanted="a torch.nn.Module", remedy=remedy
        )
    if found := compiled_parts(model):
        raise LayerError(
            "a compiled model cannot be pruned",
            got=found,
            wanted="the dense model that it was compiled from, or one that is masked",
            remedy="prune that one and compile again, or twofour.load(path, model, masked=True) a saved file",
        )
    _refuse_planned(data=data, permute=permute, example=example)
    recipe = Recipe.parse(pattern, criterion=criterion, skip=skip, eligibility=eligibility)
    assignment = recipe.assign(model)
    for skipped in assignment.skipped:
        _log.info("`%s` stays dense: %s", skipped.name, skipped.reason)
    if not assignment.weights:
        raise _nothing_to_prune(assignment)
    masks.attach_all(
        [(weight, choose(weight, chosen, recipe.criterion), chosen) for weight, chosen in assignment.weights]
    )
    _log_summary(assignment)
    return model


def choose(weight: PrunableWeight, pattern: Pattern, criterion: Criterion) -> Tensor:
    """Return the mask that `criterion` chooses for one weight, in the weight's own shape; nothing changes.

    Raises:
        PatternError: The weight holds NaN or infinity.
    """
    values = whole(weight.parameter.detach())
    scores = weight.reduction_last(criterion.score(values))
    try:
        with torch.no_grad():
            return weight.from_reduction_last(pattern.project(scores, absolute=criterion.absolute))
    except PatternError as error:
        raise error.for_layer(weight.name) from None


def _refuse_planned(**options: Any) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise RecipeError(
                f"the option `{name}` is planned, not built yet",
                wanted=f"prune without `{name}`",
                remedy='criterion "magnitude" needs neither data nor an example',
            )


def _nothing_to_prune(assignment: Assignment) -> LayerError:
    return LayerError(
        "nothing in the model can be pruned",
        reasons=[f"`{skipped.name}`: {skipped.reason}" for skipped in assignment.skipped]
        or ["the model has no parameter with two or more axes"],
        wanted="at least one Linear, Conv1d or Conv2d that a rule matches and the pattern fits",
        remedy='eligibility="any" lifts ASP\'s rule of 8 x 16 multiples',
    )


def _log_summary(assignment: Assignment) -> None:
    counts: dict[str, int] = {}
    for _, pattern in assignment.weights:
        counts[pattern.name] = counts.get(pattern.name, 0) + 1
    values = sum(weight.parameter.numel() for weight, _ in assignment.weights)
    _log.info(
        "pruned %s: %s values under a mask; %d parameters with two or more axes stay dense",
        ", ".join(f"{count} weights to {name}" for name, count in counts.items()),
        f"{values:,}",
        len(assignment.skipped),
    )
