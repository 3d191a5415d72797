"""The multiple-choice knapsack: one option for each layer, the least value within a limit of cost.

Solved by lists of undominated partial sums (Nemhauser and Ullmann 1969, "Discrete dynamic programming and capital
allocation", Management Science 15(9)): layer by layer every state is extended by every option, and a state that costs
no less than another and is worth no better is dropped. What is left at the end is the whole trade-off curve, exactly,
while the lists stay within a number of states. Beyond it they are thinned to one state for each of that many equal
steps of cost: sums stay exact, so an answer never breaks its limit, and it is no worse than the best one for a limit
lower by layers / states of the range of costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twofour.errors import RecipeError, integer_from

STATES = 20_000
"""Partial sums kept: 100 layers of 5 patterns take a second or two."""

SLACK = 1e-9
"""Relative rounding error of a sum that does not count as going over a limit."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Frontier:
    """The undominated choices, ascending in cost and strictly descending in value.

    Attributes:
        costs: float64 (n,).
        values: float64 (n,).
        exact: Whether no state was dropped that another did not dominate.
    """

    costs: Floats
    values: Floats
    exact: bool
    _stages: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]

    def options(self, index: int) -> tuple[int, ...]:
        """Return the option of each layer in the choice with that index."""
        found: list[int] = []
        for parent, option in reversed(self._stages):
            found.append(int(option[index]))
            index = int(parent[index])
        return tuple(reversed(found))

    def within_cost(self, limit: float) -> int | None:
        """Return the index of the choice of least value that costs at most `limit`, or None."""
        fitting = int(np.searchsorted(self.costs, _raised(limit, self.costs), side="right"))
        return fitting - 1 if fitting else None

    def within_value(self, limit: float) -> int | None:
        """Return the index of the cheapest choice whose value is at most `limit`, or None."""
        fitting = np.flatnonzero(self.values <= _raised(limit, self.values))
        return int(fitting[0]) if fitting.size else None


def _raised(limit: float, numbers: Floats) -> float:
    return limit + SLACK * max(abs(limit), float(np.abs(numbers).max()) if np.isfinite(limit) else 0.0)


def frontier(costs: Sequence[Sequence[float]], values: Sequence[Sequence[float]], states: int = STATES) -> Frontier:
    """Return the undominated choices of one option for each layer.

    Args:
        costs: For each layer the cost of each of its options; any finite numbers.
        values: The same of the values, of which less is better.
        states: Partial sums kept, at least 2.

    Raises:
        RecipeError: `states` is too small.
    """
    remedy = f"leave it out to keep {STATES} partial sums"
    integer_from(2, "`states` cannot be used", RecipeError, remedy, states=states)
    cost, value = np.zeros(1), np.zeros(1)
    stages: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    exact = True
    for layer_costs, layer_values in zip(costs, values, strict=True):
        count = len(layer_costs)
        all_costs = (cost[:, None] + np.asarray(layer_costs, dtype=np.float64)).ravel()
        all_values = (value[:, None] + np.asarray(layer_values, dtype=np.float64)).ravel()
        kept = _undominated(all_costs, all_values)
        if len(kept) > states:
            kept, exact = kept[_one_for_each_step(all_costs[kept], states)], False
        cost, value = all_costs[kept], all_values[kept]
        stages.append((kept // count, kept % count))
    return Frontier(cost, value, exact, tuple(stages))


def _undominated(costs: Floats, values: Floats) -> NDArray[np.int64]:
    """Return the indices of the undominated points, ascending in cost; the first of equal ones."""
    order = np.lexsort((values, costs))
    best_before = np.minimum.accumulate(np.concatenate(([np.inf], values[order][:-1])))
    return order[values[order] < best_before]


def _one_for_each_step(costs: Floats, states: int) -> NDArray[np.int64]:
    """Return the last, and so the best, position in each of `states` - 1 steps of cost, and the cheapest of all."""
    steps = np.minimum((costs - costs[0]) * ((states - 1) / (costs[-1] - costs[0])), states - 2).astype(np.int64)
    last = np.flatnonzero(np.append(np.diff(steps) > 0, True))
    return last if last[0] == 0 else np.concatenate(([0], last))
