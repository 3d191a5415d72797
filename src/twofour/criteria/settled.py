"""Weights whose zeros obey the pattern asked for already: nothing is to choose in them, and nothing to win.

What would be solved for is the weight itself, which its own mask answers exactly: an update moved values by what its
damping adds, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from twofour.criteria.base import Criterion
from twofour.criteria.outcome import Choice, Outcome
from twofour.errors import PatternError
from twofour.layers import PrunableWeight, full_tensor
from twofour.patterns import Pattern
from twofour.patterns.base import is_finite

LEFT = "left"
"""What stands as the criterion of such a weight."""


def settled(
    weights: Sequence[tuple[PrunableWeight, Pattern]],
    criterion: Criterion,
    masked: Mapping[tuple[nn.Module, str], tuple[Pattern, Tensor]],
) -> list[Choice]:
    """Return the masks of the weights whose values can stay all as they are, each with an outcome that says so.

    A weight keeps the mask that it carries of the same pattern; else zeros fill the mask up, the lowest index first.
    One of zeros alone that carries none was made so (adapters, heads), not pruned: its mask is the criterion's.

    Args:
        weights: What to prune, and the pattern of each.
        criterion: Of one that ranks several weights together either all of them stay as they are or none.
        masked: Pattern and mask of the weights that carry one, by module and attribute.
    """
    found: list[Choice] = []
    for weight, pattern in weights:
        keep = _mask(weight, pattern, masked.get((weight.module, weight.attribute)))
        if keep is not None:
            note = f"{pattern.name} already: its values are left as they were"
            found.append(Choice(weight, pattern, keep, Outcome(weight.name, pattern.name, LEFT, note=note)))
    together = getattr(criterion, "over", "weight") != "weight"
    return [] if together and len(found) < len(weights) else found


@torch.no_grad()
def _mask(weight: PrunableWeight, pattern: Pattern, carried: tuple[Pattern, Tensor] | None) -> Tensor | None:
    """Return a mask of the pattern that keeps every value of a weight but zeros, None where there is none."""
    whole = full_tensor(weight.parameter.detach())
    values = weight.reduction_last(whole)
    try:
        made = carried is None and not bool(whole.any())
        if made or not is_finite(whole) or not pattern.check(values).ok:
            return None
    except PatternError:  # the criterion says what is wrong with it
        return None
    if carried is not None and carried[0] == pattern and not bool(whole[~full_tensor(carried[1])].any()):
        return full_tensor(carried[1]).clone()
    keep = pattern.project(values, absolute=True)
    return None if bool(values[~keep].any()) else weight.from_reduction_last(keep)
