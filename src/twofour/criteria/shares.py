"""Blocks ranked over the whole model: how many each weight keeps of as many as all keep together."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import ceil

import torch
from torch import Tensor, nn

from twofour import calibration
from twofour.calibration import Batch, Statistics
from twofour.criteria.base import Layerwise, Scored
from twofour.criteria.importance import importance
from twofour.errors import PatternError, RecipeError
from twofour.layers import PrunableWeight, full_tensor
from twofour.patterns import Block, Pattern
from twofour.patterns.base import is_finite, non_finite

LEAST = 0.25
"""Of the blocks that a weight would keep by itself, the share it keeps whatever the others have: none is emptied."""


def shares(patterns: Sequence[Block], ranks: Sequence[Tensor]) -> list[Block]:
    """Return each weight's pattern with the share of zeros that a ranking over all of them gives it.

    Weights of the same block and share are ranked together; as many of their blocks stay as if each weight were ranked
    by itself. Of equal ranks the first in order stay.

    Args:
        patterns: What each weight was to be.
        ranks: What its blocks are ranked by, `Block.ranks`.
    """
    found = list(patterns)
    for one in dict.fromkeys((pattern.r, pattern.c, pattern.sparsity) for pattern in patterns):
        places = [i for i, pattern in enumerate(patterns) if (pattern.r, pattern.c, pattern.sparsity) == one]
        counts = _kept([patterns[i] for i in places], [ranks[i].detach().flatten().cpu() for i in places])
        for i, kept in zip(places, counts, strict=True):
            found[i] = patterns[i].at(1 - kept / ranks[i].numel())
    return found


def _kept(patterns: Sequence[Block], ranks: Sequence[Tensor]) -> list[int]:
    """Return how many blocks each weight keeps."""
    alone = [rank.numel() - pattern.zeros(rank.numel()) for pattern, rank in zip(patterns, ranks, strict=True)]
    least = [ceil(LEAST * count) for count in alone]
    raised = []  # those that stay in any case come before all others
    for rank, count in zip(ranks, least, strict=True):
        values = rank.double()
        raised.append(values.index_fill(0, values.sort(descending=True, stable=True).indices[:count], float("inf")))
    together = torch.cat(raised)
    stays = torch.zeros(len(together), dtype=torch.bool, device="cpu")
    stays[together.sort(descending=True, stable=True).indices[: sum(alone)]] = True
    return [int(part.sum()) for part in stays.split([len(rank) for rank in ranks])]


def over_model(
    model: nn.Module,
    weights: Sequence[tuple[PrunableWeight, Pattern]],
    criterion: Layerwise,
    *,
    data: Sequence[Batch] | None = None,
    slopes: Mapping[str, Tensor] | None = None,
) -> list[tuple[PrunableWeight, Pattern]]:
    """Return the weights with the patterns that a ranking over the model gives those that are to have blocks.

    Criteria that rank by inputs do it on those of the dense model, and Wanda's scores stand for those of criteria with
    a Hessian (`importance`); a weight that the data do not reach is ranked by itself.

    Args:
        model: The dense model.
        weights: What to prune, and the pattern of each.
        criterion: How.
        data: What `calibration.take` returned, for criteria that rank by inputs.
        slopes: Gradients by the weights' names, for those that follow a loss.

    Raises:
        PatternError: Scores hold NaN or infinity.
        RecipeError: No weight is to have blocks, so that there is nothing to rank.
    """
    blocks = [(weight, pattern) for weight, pattern in weights if isinstance(pattern, Block)]
    if not blocks:
        raise RecipeError(
            "nothing can be ranked over the model",
            got=f"over=model with {', '.join(dict.fromkeys(pattern.name for _, pattern in weights))}",
            wanted='a pattern of blocks, "block:16x16@0.9": the others say how much of each group stays',
            remedy="leave over=model out; twofour.allocation gives layers different patterns",
        )
    known = importance(model, [weight for weight, _ in blocks], criterion, data=data, samples=sys.maxsize)
    ranked: dict[str, tuple[Block, Tensor]] = {}
    for weight, pattern in blocks:
        found = _scores(weight, criterion, known, slopes or {})
        if found is not None:
            ranked[weight.name] = pattern, _ranks(weight, pattern, criterion, *found)
    own = shares([pattern for pattern, _ in ranked.values()], [ranks for _, ranks in ranked.values()])
    named = dict(zip(ranked, own, strict=True))
    return [(weight, named.get(weight.name, pattern)) for weight, pattern in weights]


def _scores(
    weight: PrunableWeight, criterion: Layerwise, known: Mapping[str, Tensor], slopes: Mapping[str, Tensor]
) -> tuple[Tensor, bool] | None:
    """Return a weight's scores (groups, rows, in), and whether their absolute values count."""
    if criterion.need in ("norms", "hessian"):
        return (calibration.matrix(weight, known[weight.name]), False) if weight.name in known else None
    assert isinstance(criterion, Scored), "others rank by inputs"
    values, statistics = calibration.matrix(weight, full_tensor(weight.parameter.detach())), Statistics("gradients")
    if weight.name in slopes:
        statistics.gradient = calibration.matrix(weight, slopes[weight.name])
    return criterion.score(values, statistics, weight.name), criterion.absolute


def _ranks(weight: PrunableWeight, pattern: Block, criterion: Layerwise, scores: Tensor, absolute: bool) -> Tensor:
    # The square of Wanda's score is what SparseGPT's comes down to where inputs do not correlate.
    norm = criterion.norm if isinstance(criterion, Scored) else "l2"
    try:
        return pattern.ranks(scores.flatten(0, 1), norm, absolute=absolute)
    except PatternError as error:
        parameter = full_tensor(weight.parameter.detach())
        error = error if is_finite(parameter) else non_finite("the weight", parameter)
        raise error.for_layer(weight.name) from None
