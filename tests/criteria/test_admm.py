"""ADMM against dense solvers in float64, and never worse than SparseGPT."""

import pytest
import torch

from tests.criteria.test_activation import random, seen
from tests.criteria.test_sparsegpt import correlated
from tests.turns import in_turn
from twofour import criteria
from twofour.calibration import Statistics
from twofour.criteria import ADMM, SparseGPT
from twofour.criteria.admm import on_support, search
from twofour.errors import RecipeError
from twofour.patterns import parse


def test_conjugate_gradients_find_the_exact_minimum() -> None:
    x, weight = correlated(100, 24).double(), random(5, 24, seed=4).double()
    hessian = x.T @ x / 100 + 0.01 * torch.eye(24, dtype=torch.float64)
    keep = parse("2:4").project(random(5, 24, seed=5))
    found = on_support(weight, weight.masked_fill(~keep, 0), keep, hessian, 100)
    for row in range(5):
        kept = keep[row].nonzero().flatten()
        exact = torch.linalg.solve(hessian[kept][:, kept], hessian[kept] @ weight[row])
        torch.testing.assert_close(found[row, kept], exact, rtol=1e-4, atol=1e-5)
    assert (found[~keep] == 0).all()


def test_the_search_keeps_the_pattern_and_stays_where_nothing_is_better() -> None:
    x, weight = correlated(200, 32).double(), random(6, 32, seed=4).double()
    hessian, live = x.T @ x / 200 + 0.1 * torch.eye(32, dtype=torch.float64), torch.ones(32, dtype=torch.bool)
    found = search(weight, weight.masked_fill(~parse("2:4").project(weight.abs()), 0), hessian, live, parse("2:4"), 40)
    assert parse("2:4").check(found).ok
    sparse = weight.masked_fill(~parse("2:4").project(weight.abs()), 0)
    assert torch.equal(search(sparse, sparse, hessian, live, parse("2:4"), 40) != 0, sparse != 0)


@in_turn("pattern", ["2:4", "1:4", "4:8", "4:8-pairs", "3:5"])
@in_turn("rank", [None, 20, 3])
def test_never_worse_than_sparsegpt(pattern: str, rank: int | None) -> None:
    width = {"3:5": 60}.get(pattern, 64)
    weight, x = random(1, 16, width, seed=6), correlated(300, width, seed=7, rank=rank)
    statistics = seen(x, "hessian")
    errors = []
    for criterion in (SparseGPT(), ADMM(steps=0), ADMM()):
        solution = criterion.solve(weight, parse(pattern), statistics, "w")
        assert solution.values is not None and parse(pattern).check(solution.values[0]).ok
        assert (solution.values[~solution.keep] == 0).all()
        errors.append(statistics.error(weight, solution.values))
    assert errors[1] < errors[0] and errors[2] <= errors[1] * 1.05  # equal but for the damping
    assert solution.note.startswith(f"SparseGPT alone: {errors[0]:.4f}; this is ")


def test_dead_inputs_do_not_take_the_place_of_live_ones() -> None:
    weight, x = random(1, 8, 32, seed=2), correlated(100, 32)
    x[:, ::4] = 0
    x[:, 1::4] = 0
    solution = ADMM().solve(weight, parse("2:4"), seen(x, "hessian"), "w")
    assert solution.keep.unflatten(-1, (-1, 4))[..., 2:].all()
    assert (ADMM().solve(weight, parse("2:4"), seen(torch.zeros(4, 32), "hessian"), "w").keep.sum() == 8 * 16).all()


def test_groups_and_the_same_bits_every_time() -> None:
    both = Statistics("hessian")
    both.add(random(2, 60, 16, seed=1))
    first, second = (ADMM().solve(random(2, 4, 16), parse("2:4"), both, "w") for _ in range(2))
    assert first.values is not None and second.values is not None and torch.equal(first.values, second.values)


def test_options() -> None:
    assert criteria.parse("admm:steps=0,refine=10") == ADMM(steps=0, refine=10)
    with pytest.raises(RecipeError, match=r"ADMM's options cannot be used\n  got +dampening=0.01, block=128, steps=-1"):
        criteria.parse("admm:steps=-1")
