"""confirm: an allocation beside the same pattern everywhere, both pruned and judged; the better of them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calibration, criteria
from twofour.allocation.allocate import Allocation, uniform
from twofour.allocation.records import Sensitivities
from twofour.allocation.task import task
from twofour.calibration.gradients import require_function
from twofour.calibration.passes import calibrating
from twofour.errors import RecipeError
from twofour.layers import require_module
from twofour.pruning import prune
from twofour.recipe import DENSE

_log = logging.getLogger("twofour.allocation")

ALLOCATED = "allocated"
"""Name of the allocation among what was judged."""


def confirm(
    chosen: Allocation,
    found: Sensitivities,
    model: nn.Module,
    data: Any,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    samples: int | None = None,
    progress: bool = True,
) -> Allocation:
    """Return an allocation, or the same pattern everywhere where that costs no more and loses less.

    An allocation minimises a sum over layers, each pruned alone; pruned together they may lose more than one pattern
    everywhere does. So copies of the model are pruned by the recipes, and judged on a fifth of the data that the
    pruning has not seen. `sensitivity` should not have seen them either where there are enough.

    Args:
        chosen: From `allocate`.
        found: What it was chosen from.
        model: The dense model; it stays as it is.
        data: Calibration data, as `prune` takes them; pairs (input, target) where a loss is given.
        loss: `loss(output, target)`: its mean over the samples held back judges.
        evaluate: `evaluate(model)` -> a number, larger is better, which judges in its place. Without either the
            distance of the model's outputs from the dense model's does.
        samples: How many samples are used. Default: 128.
        progress: Show a progress bar on a terminal.

    Returns:
        The better one, with the figures of all in `judged`; smaller is better.

    Raises:
        RecipeError: The records are those of other layers than the allocation, or of another model.
        DataError: The data cannot be used, the model does not run on them, or the judge answers with no finite number.
        LayerError: The model is masked or compiled already.
    """
    require_module(model)
    if loss is not None:
        require_function(loss)
    _require_own(chosen, found, model)
    tried = {ALLOCATED: chosen, **_rivals(chosen, found)}
    tell = _log.warning if samples is None else _log.info
    count = criteria.SAMPLES if samples is None else samples
    batches = calibration.take(model, data, count, paired=loss is not None, tell=tell)
    used, held = calibration.hold_back(model, batches)
    judged = []
    for name, one in tried.items():
        pruned = _pruned(model, one, used, loss, progress)
        with calibrating(pruned), torch.no_grad():
            score = task(pruned, held.batches, loss, evaluate)
            judged.append((name, held.lost(pruned) if score is None else score()))
        _log.info("%s: judged %.6g on %d samples held back", *judged[-1], held.samples)
    best, least = min(judged, key=lambda pair: pair[1])
    if best != ALLOCATED:
        said = "%s everywhere loses less than the allocation, %.4g against %.4g on data held back, and is taken"
        _log.warning(said, best, least, judged[0][1])
    return replace(tried[best], budget=chosen.budget, judged=tuple(judged))


def _require_own(chosen: Allocation, found: Sensitivities, model: nn.Module) -> None:
    """Refuse an allocation of other sensitivities, and sensitivities of another model."""
    if [layer for layer, _ in chosen.chosen] != [layer.layer for layer in found.layers]:
        raise RecipeError(
            "the allocation was not chosen from these sensitivities",
            got=f"{len(chosen.chosen)} layers and {len(found.layers)} layers",
            wanted="the records that `allocate` was given",
            remedy="confirm(allocate(found, budget), found, model, data)",
        )
    names = dict(model.named_modules(remove_duplicate=False))
    if missing := [layer.layer for layer in found.layers if layer.layer not in names]:
        raise RecipeError(
            "the sensitivities belong to another model",
            got=f"a {type(model).__name__} without {', '.join(f'`{name}`' for name in missing[:3])}",
            wanted="the model that `sensitivity` was given",
            remedy="sensitivity(model, data, patterns) measures this one",
        )


def _rivals(chosen: Allocation, found: Sensitivities) -> dict[str, Allocation]:
    """Return the patterns that everywhere cost no more than the budget allows, or than the allocation does."""
    budget, rivals = chosen.budget, {}
    limits_time = budget is not None and budget.density is None and budget.minimise != "density"
    by_time = limits_time and chosen.latency is not None
    limit = budget.limit if budget is not None and budget.loss is None else _cost(chosen, by_time)
    for pattern in found.patterns:
        if pattern == DENSE:
            continue
        try:
            rival = uniform(found, pattern, loss=chosen.kind)
        except RecipeError as error:  # it fits some layers only, and "dense" is no candidate of the others
            _log.info("%s everywhere is not compared: %s", pattern, error.what)
            continue
        if _cost(rival, by_time) <= limit * (1 + 1e-9) and rival.chosen != chosen.chosen:
            rivals[pattern] = rival
    return rivals


def _cost(one: Allocation, by_time: bool) -> float:
    return one.latency or 0.0 if by_time else one.density


def _pruned(
    model: nn.Module, one: Allocation, used: Sequence[calibration.Batch], loss: Any, progress: bool
) -> nn.Module:
    made = copy.deepcopy(model)
    if all(pattern == DENSE for _, pattern in one.chosen):
        return made
    criterion = one.recipe.criterion
    follows = loss if criterion.need in ("gradients", "training") else None
    given = None if criterion.need is None else list(used)
    count = sum(batch.samples for batch in used)
    return prune(made, one.recipe, data=given, loss=follows, samples=count, progress=progress)
