"""Budgets and the recipes that meet them, against every choice there is."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

import twofour
from tests.turns import in_turn
from twofour import masks
from twofour.allocation import (
    Allocation,
    Budget,
    Candidate,
    LayerSensitivity,
    Sensitivities,
    allocate,
    confirm,
    trade_off,
    uniform,
)
from twofour.errors import RecipeError
from twofour.recipe import Recipe

NAMES = ("dense", "2:4", "4:8", "1:4")
DENSITY = (1.0, 0.5, 0.5, 0.25)
LAYERS = {"first": 1024, "block.fc1": 2048, "block": 512, "last[0]": 256}


def layer(name: str, values: int, errors: tuple[float, ...], timed: bool = True) -> LayerSensitivity:
    sparse = (False, True, False, True)
    found = [
        Candidate(pattern, int(values * density), error, 3 * error**2, legal, values / (2048 if legal else 1024))
        for pattern, density, error, legal in zip(NAMES, DENSITY, errors, sparse, strict=True)
    ]
    if not timed:
        found = [Candidate(c.pattern, c.kept, c.error, c.change, c.sparse) for c in found]
    return LayerSensitivity(name, (name,), values, tuple(found))


def some(timed: bool = True, task: bool = True) -> Sensitivities:
    errors = [(0.0, 0.3, 0.25, 0.6), (0.0, 0.1, 0.09, 0.2), (0.0, 0.5, 0.3, 0.9), (0.0, 0.2, 0.2, 0.2)]
    layers = tuple(layer(*entry, found, timed) for entry, found in zip(LAYERS.items(), errors, strict=True))
    return Sensitivities(layers, NAMES, "magnitude", "asp", 1.5 if task else None, (), "1 thread" if timed else "")


def every(found: Sensitivities, kind: str) -> list[tuple[float, float, float]]:
    """Loss, density and ms of every choice."""
    return [
        (
            math.fsum(c.loss(kind) for c in choice),
            sum(c.kept for c in choice) / found.values,
            math.fsum(c.ms or 0.0 for c in choice),
        )
        for choice in itertools.product(*(entry.candidates for entry in found.layers))
    ]


@in_turn("kind", ["task", "error"])
@in_turn("limit", [0.25, 0.3, 0.5, 0.77, 1.0])
def test_a_budget_of_density_is_met_at_the_least_loss(kind, limit):
    found = some()
    got = allocate(found, Budget(density=limit), loss=kind)
    assert got.exact and got.density <= limit and got.kind == kind
    assert got.loss == pytest.approx(min(loss for loss, density, _ in every(found, kind) if density <= limit))


@pytest.mark.parametrize("limit", [1.875, 2.2, 3.0, 3.75])
def test_a_budget_of_latency_is_met_at_the_least_loss(limit):
    found = some()
    got = allocate(found, Budget(latency=limit))
    assert got.latency is not None and got.latency <= limit * (1 + 1e-9)
    assert got.loss == pytest.approx(min(loss for loss, _, ms in every(found, "task") if ms <= limit))
    assert "4:8" not in dict(got.chosen).values(), "it takes the dense kernel's time and loses more"


@pytest.mark.parametrize("limit", [0.0, 0.05, 0.31, 100.0])
def test_a_budget_of_loss_is_met_at_the_least_cost(limit):
    found = some()
    fast = allocate(found, Budget(loss=limit))
    assert fast.latency == pytest.approx(min(ms for loss, _, ms in every(found, "task") if loss <= limit))
    small = allocate(found, Budget(loss=limit, minimise="density"))
    assert small.density == min(density for loss, density, _ in every(found, "task") if loss <= limit)
    assert allocate(some(timed=False), Budget(loss=limit)).chosen == small.chosen
    assert small.loss <= limit + 1e-12


def test_the_loss_is_the_tasks_where_it_was_measured():
    assert allocate(some(), Budget(density=0.5)).kind == "task"
    assert allocate(some(task=False), Budget(density=0.5)).kind == "error"


def test_the_recipe_names_each_layer_and_survives_toml(tmp_path):
    got = allocate(some(), Budget(density=0.5))
    assert got.recipe.rules[0][0] == "block.fc1", "a rule for `block` holds for what is inside, so it stands after it"
    for name, pattern in got.chosen:
        chosen = got.recipe.pattern_for(name)
        assert (chosen.name if chosen else "dense") == pattern, name
    got.recipe.save(tmp_path / "recipe.toml")
    assert Recipe.load(tmp_path / "recipe.toml") == got.recipe
    assert got.to_dict()["chosen"] == dict(got.chosen)


def test_prune_takes_the_recipe():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(16, 10))
    errors = {"0": (0.0, 0.9, 0.9, 0.9), "1": (0.0, 0.1, 0.1, 0.1)}
    layers = tuple(layer(name, 1024 >> int(name), found) for name, found in errors.items())
    found = Sensitivities(layers, NAMES, "magnitude", "asp", 0.0)
    twofour.prune(model, allocate(found, Budget(density=0.75)).recipe)
    assert {name: mask.pattern.name for name, mask in masks.of(model).items()} == {"1.weight": "1:4"}


def test_a_model_that_is_one_layer():
    found = Sensitivities((layer("", 512, (0.0, 0.1, 0.1, 0.3)),), NAMES, "magnitude", "asp")
    got = allocate(found, Budget(density=0.5))
    assert got.chosen == (("", "2:4"),)
    model = twofour.prune(nn.Linear(32, 16), got.recipe)
    assert set(masks.of(model)) == {"weight"}


def test_the_same_pattern_everywhere_and_the_curve():
    found = some()
    same = uniform(found, "2:4")
    assert same.density == 0.5 and same.latency == pytest.approx(found.values / 2048) and same.budget is None
    assert allocate(found, Budget(density=0.5)).loss <= same.loss
    curve = trade_off(found)
    assert curve[-1] == (1.0, 0.0)
    assert all(a < c and b > d for (a, b), (c, d) in itertools.pairwise(curve))
    assert curve[0][0] == 0.25
    assert trade_off(found, "latency")[-1][1] == 0.0


def test_fewer_candidates_without_measuring_again():
    found = some().only("2:4", "dense")
    assert found.patterns == ("dense", "2:4")
    assert set(dict(allocate(found, Budget(density=0.75)).chosen).values()) == {"dense", "2:4"}
    text = message(lambda: some().only("dense", "8:16"))
    assert text.startswith("the pattern '8:16' is not among the candidates\n  got     dense, 2:4, 4:8, 1:4")


def test_candidates_that_fit_no_layer_leave_none():
    text = message(lambda: some().only())
    assert text == (
        "no layer is left\n  got     no patterns\n  wanted  candidates that fit a layer, of dense, 2:4, 4:8, 1:4\n"
        "  try     name more patterns: .layers lists what was measured for each layer"
    )


def test_layers_without_times_cost_none():
    found = some()
    first = LayerSensitivity("first", ("first",), 1024, layer("first", 1024, (0.0, 0.3, 0.2, 0.6), False).candidates)
    found = Sensitivities((first, *found.layers[1:]), NAMES, "magnitude", "asp", 1.5, (), "1 thread")
    got = allocate(found, Budget(latency=1.4))
    assert dict(got.chosen)["first"] == "dense", "no pattern makes it faster"
    assert got.latency is not None and got.latency <= 1.4


def test_what_it_says():
    text = str(allocate(some(), Budget(density=0.5)))
    assert "block.fc1  " in text
    assert text.splitlines()[-1].startswith("predicted task loss ") and text.endswith("(density at most 0.5)")
    assert "ms" not in str(allocate(some(timed=False), Budget(loss=0.3)))


def message(call) -> str:
    with pytest.raises(RecipeError) as caught:
        call()
    return str(caught.value)


def test_impossible_budgets_say_what_is_possible():
    assert message(lambda: allocate(some(), Budget(density=0.2))) == (
        "no choice of patterns is within the budget\n"
        "  got     density at most 0.2\n"
        "  wanted  at least a density of 0.2500, the least of 4 layers with the candidates dense, 2:4, 4:8, 1:4\n"
        "  try     a larger budget, or sparser patterns among the candidates"
    )
    assert "at least 1.8750 ms" in message(lambda: allocate(some(), Budget(latency=1.8)))
    text = message(lambda: allocate(some(), Budget(loss=-1.0)))
    assert "at least a predicted task loss of 0, " in text and '"dense" among the patterns' in text


def test_what_was_not_measured_is_refused():
    text = message(lambda: allocate(some(timed=False), Budget(latency=1.0)))
    assert text.startswith("the times of the layers were not measured") and "allocation.timed(" in text
    text = message(lambda: allocate(some(task=False), Budget(density=0.5), loss="task"))
    assert text.startswith("the change of the task's loss was not measured") and 'loss="error"' in text
    text = message(lambda: allocate(some(), Budget(density=0.5), loss="accuracy"))  # pyright: ignore
    assert text.startswith(
        'the loss to be summed is unknown\n  got     \'accuracy\'\n  wanted  "task" or "error"\n  try '
    )
    text = message(lambda: uniform(some(), "8:16"))
    assert text.startswith("the pattern '8:16' is not among the candidates")
    assert message(lambda: trade_off(some(timed=False), "latency")).startswith("the times of the layers")


@pytest.mark.parametrize(
    "limits", [{}, {"density": 0.5, "latency": 1.0}, {"density": "half"}, {"loss": math.nan}, {"density": True}]
)
def test_a_budget_has_one_limit(limits):
    text = message(lambda: Budget(**limits))
    assert text.startswith("a budget has one limit\n  got     ") and "Budget(density=0.5)" in text


@pytest.mark.parametrize("limit", [2, 0, -0.5])
def test_a_density_is_a_fraction(limit: float):
    text = message(lambda: Budget(density=limit))
    assert text.startswith(f"the budget's limit is impossible\n  got     density={limit}\n  wanted  a density above 0")


def test_minimise_stands_beside_a_loss_only():
    assert "`minimise` cannot be used" in message(lambda: Budget(density=0.5, minimise="latency"))
    assert "minimise='bytes'" in message(lambda: Budget(loss=0.5, minimise="bytes"))  # pyright: ignore


def test_an_allocation_is_a_record():
    got = allocate(some(), Budget(density=0.5))
    assert isinstance(got, Allocation)
    with pytest.raises(AttributeError):
        got.loss = 0.0  # pyright: ignore


@pytest.mark.parametrize("limits", [{"size": 1000}, {"bytes": 1000}, {"milliseconds": 1}, {"density": 0.5, "ms": 1}])
def test_a_limit_of_another_name_is_told_those_there_are(limits):
    text = message(lambda: Budget(**limits))
    name, limit = list(limits.items())[-1]
    assert text.startswith(f"a budget has no such limit\n  got     {name}={limit}\n  wanted  one of loss, density (")
    assert "Budget(latency=1.5)" in text and "or a loss" in message(lambda: Budget(density=50))


def test_a_number_is_no_budget():
    text = message(lambda: allocate(some(), 0.25))  # pyright: ignore
    assert text.startswith("there is no budget\n  got     0.25\n") and "allocate(found, Budget(density=0.25))" in text
    assert copy.deepcopy(Budget(density=0.5)) == pickle.loads(pickle.dumps(Budget(density=0.5)))


def test_measured_times_are_shown():
    shown = str(some())
    first = some().layers[0]
    row = next(line for line in shown.split("\n\n")[1].splitlines() if line.startswith(first.layer))
    assert [float(cell) for cell in row.split()[1:] if cell != "-"] == [
        pytest.approx(one.ms, rel=1e-3) for one in first.candidates
    ]
    assert "milliseconds of a layer" in shown and "milliseconds" not in str(some(timed=False))


def test_a_choice_is_confirmed_for_its_own_model_only():
    found = some()
    chosen = allocate(found, Budget(density=0.5))
    text = message(lambda: confirm(chosen, found, nn.Linear(16, 16), [torch.randn(8, 16)]))
    assert text.startswith("the sensitivities belong to another model\n  got     a Linear without `")
