"""The knapsack against every choice there is."""

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofour.allocation.knapsack import STATES, frontier
from twofour.errors import RecipeError

numbers = st.integers(-8, 8).map(lambda n: n / 4)  # exact sums, with ties
options = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4)
layers = st.lists(options, min_size=1, max_size=5)


def choices(
    costs: Sequence[Sequence[float]], values: Sequence[Sequence[float]]
) -> Iterator[tuple[float, float, tuple[int, ...]]]:
    """Yield cost, value and options of every choice there is: the reference of `frontier`, for a few layers."""
    for options in product(*(range(len(layer)) for layer in costs)):
        cost = sum(layer[option] for layer, option in zip(costs, options, strict=True))
        yield cost, sum(layer[option] for layer, option in zip(values, options, strict=True)), options


def split(found):
    return [[cost for cost, _ in layer] for layer in found], [[value for _, value in layer] for layer in found]


@settings(max_examples=150, deadline=None)
@given(layers)
def test_the_curve_is_that_of_all_choices(found):
    costs, values = split(found)
    everything = list(choices(costs, values))
    got = frontier(costs, values)
    wanted = {
        (cost, value)
        for cost, value, _ in everything
        if not any(c <= cost and v <= value and (c, v) != (cost, value) for c, v, _ in everything)
    }
    assert got.exact
    assert list(zip(got.costs.tolist(), got.values.tolist(), strict=True)) == sorted(wanted)
    for index in range(len(got.costs)):
        taken = got.options(index)
        assert sum(layer[o] for layer, o in zip(costs, taken, strict=True)) == got.costs[index]
        assert sum(layer[o] for layer, o in zip(values, taken, strict=True)) == got.values[index]


@settings(max_examples=150, deadline=None)
@given(layers, numbers)
def test_the_best_within_a_limit_is_that_of_all_choices(found, limit):
    costs, values = split(found)
    everything = list(choices(costs, values))
    got = frontier(costs, values)
    index = got.within_cost(limit)
    best = min((value for cost, value, _ in everything if cost <= limit), default=None)
    assert (None if index is None else got.values[index]) == best
    index = got.within_value(limit)
    best = min((cost for cost, value, _ in everything if value <= limit), default=None)
    assert (None if index is None else got.costs[index]) == best


def traded(layers: int, options: int, seed: int):
    """Costs and values such that what costs more is worth more, as of patterns: long curves."""
    generator = np.random.default_rng(seed)
    costs = generator.random((layers, options))
    return costs.tolist(), ((1 - costs) ** 2 * generator.random((layers, 1))).tolist()


@pytest.mark.parametrize("states", [2, 3, 8, 30])
def test_thinned_lists_stay_within_the_stated_resolution(states):
    costs, values = traded(7, 4, states)
    exact, thinned = frontier(costs, values), frontier(costs, values, states)
    assert exact.exact and not thinned.exact and len(thinned.costs) <= states
    step = len(costs) / (states - 1) * (sum(map(max, costs)) - sum(map(min, costs)))
    assert thinned.costs[0] == exact.costs[0], "the cheapest choice is never lost"
    for limit in np.linspace(exact.costs[0], exact.costs[-1], 50):
        index = thinned.within_cost(limit)
        assert index is not None
        taken = thinned.options(index)
        total = math.fsum(layer[o] for layer, o in zip(costs, taken, strict=True))
        assert total <= limit * (1 + 1e-8), "an answer never breaks its limit"
        lower = exact.within_cost(limit - step)
        if lower is not None:
            assert thinned.values[index] <= exact.values[lower] + 1e-12


def test_rounding_does_not_break_a_limit_that_is_met_exactly():
    costs = [[0.1, 1.0]] * 3
    assert frontier(costs, [[1.0, 0.0]] * 3).within_cost(0.3) == 0  # 0.1 + 0.1 + 0.1 > 0.3 in binary
    assert frontier(costs, [[1.0, 0.0]] * 3).within_cost(0.3 - 1e-6) is None
    assert frontier(costs, [[1.0, 0.0]] * 3).within_cost(math.inf) == 3


def test_a_hundred_layers_take_little_and_say_that_they_are_not_exact():
    found = frontier(*traded(100, 5, 0), 2_000)
    assert len(found.options(len(found.costs) - 1)) == 100
    assert not found.exact and len(found.costs) <= 2_000


@pytest.mark.parametrize("states", [1, 0, 2.5, None])
def test_too_few_states_are_refused(states):
    with pytest.raises(RecipeError) as caught:
        frontier([[0.0]], [[0.0]], states)
    assert str(caught.value) == (
        f"`states` cannot be used\n  got     states={states!r}\n  wanted  a whole number, at least 2\n"
        f"  try     leave it out to keep {STATES} partial sums"
    )
