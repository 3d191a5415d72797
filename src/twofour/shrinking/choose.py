"""choose: the width of every group within a budget, the least loss for what is saved, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from twofour.errors import ShrinkError
from twofour.shrinking.budget import Budget, Prices
from twofour.shrinking.curves import Curve
from twofour.structure.shrink import Cuttable


def choose(prices: Prices, curves: Mapping[str, Curve], budget: Budget, whole: int) -> dict[str, int]:
    """Return the width of each group: narrower and narrower, each time where the least is lost for what is saved.

    The loss of a group counts as -log(1 - share), so that one group is not emptied before others are touched.

    Args:
        prices: Of the model at its own widths; afterwards at those that were chosen.
        curves: What each group loses, by its name.
        budget: What is counted, and how much of it may stay.
        whole: What the large model has of it.

    Raises:
        ShrinkError: The narrowest widths are too wide for the budget.
    """
    limit, now = budget.fraction * whole, prices.total
    groups = {group.name: group for group in prices.found.groups if group.name in curves}
    at = dict.fromkeys(groups, 0)
    while now > limit:
        ranks = {name: _rank(prices, groups[name], curves[name], at[name], 1) for name in groups}
        name = min(ranks, key=lambda name: ranks[name][0], default="")
        if not name or ranks[name][0] == math.inf:
            raise _too_small(budget, now / whole)
        at[name] += 1
        now -= prices.set(groups[name], curves[name].widths[at[name]])
    # The last steps may have saved more than was asked for: what lost most comes back where it fits.
    for name in sorted(groups, key=lambda name: -curves[name].losses[at[name]]):
        while at[name] and now - _rank(prices, groups[name], curves[name], at[name], -1)[1] <= limit:
            at[name] -= 1
            now -= prices.set(groups[name], curves[name].widths[at[name]])
    return {name: curves[name].widths[step] for name, step in at.items()}


def _rank(prices: Prices, group: Cuttable, curve: Curve, step: int, by: int) -> tuple[float, int]:
    """Return the loss for what is saved when a group goes on by some steps, infinite at its end, and what is saved."""
    if not 0 <= step + by < len(curve.widths):
        return math.inf, 0
    saved = prices.set(group, curve.widths[step + by])
    prices.set(group, curve.widths[step])
    worse = cost(curve.losses[step + by]) - cost(curve.losses[step])
    return worse / saved if saved > 0 else math.inf, saved


def cost(share: float) -> float:
    """Return what a lost share of the outputs' energy counts as."""
    return -math.log(max(1.0 - share, 1e-6)) + max(share - 1.0, 0.0)


def _too_small(budget: Budget, least: float) -> ShrinkError:
    return ShrinkError(
        "the budget cannot be met",
        got=f"{budget.fraction:.3f} of the {budget.kind}",
        wanted=f"at least {least:.3f}: the narrowest widths of all that can be cut",
        remedy="streams=True cuts residual streams too, `least` sets how narrow a group may become; "
        "`twofour.structure.shrink.channels(model, example).uncut` says what stays whole and why",
    )
