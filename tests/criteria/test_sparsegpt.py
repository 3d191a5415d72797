"""SparseGPT against the optimal brain surgeon's formula, with a matrix inverse for every column."""

import pytest
import torch
from torch import Tensor

from tests.criteria.test_activation import PATTERNS, random, seen
from tests.turns import in_turn
from twofour import criteria
from twofour.calibration import Statistics
from twofour.criteria import Magnitude, SparseGPT, SparseGPTMask
from twofour.criteria.sparsegpt import factor
from twofour.errors import RecipeError
from twofour.patterns import Pattern, parse


def correlated(rows: int, width: int, seed: int = 0, rank: int | None = None) -> Tensor:
    mixing = random(rank or width, width, seed=seed + 1)
    return random(rows, rank or width, seed=seed + 2) @ mixing + (0.0 if rank else 0.1) * random(rows, width, seed=seed)


def reference(weight: Tensor, x: Tensor, pattern: Pattern, dampening: float) -> tuple[Tensor, Tensor]:
    """Remove the columns one by one; the inverse is that of the columns not yet passed."""
    weight, hessian = weight.double().clone(), (x.double().T @ x.double()) / len(x)
    hessian += dampening * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    keep = torch.zeros(weight.shape, dtype=torch.bool)
    for first in range(0, weight.shape[1], pattern.group):
        group = range(first, first + pattern.group)
        growth = torch.stack([torch.linalg.inv(hessian[j:, j:])[0, 0] for j in group])
        keep[:, first : first + pattern.group] = pattern.project(weight[:, list(group)] ** 2 / growth)
        for j in group:
            inverse = torch.linalg.inv(hessian[j:, j:])
            lost = torch.where(keep[:, j], 0.0, weight[:, j])
            weight[:, j:] -= torch.outer(lost / inverse[0, 0], inverse[0])
    return weight, keep


@in_turn("block", [1, 16, 128])
@in_turn("pattern", PATTERNS)
def test_against_the_reference(pattern: str, block: int) -> None:
    width = {"3:5": 45}.get(pattern, 48)
    weight, x = random(7, width, seed=5).double(), correlated(200, width).double()
    values, keep = reference(weight, x, parse(pattern), 0.01)
    solution = SparseGPT(block=block).solve(weight[None], parse(pattern), seen(x, "hessian"), "w")
    assert torch.equal(solution.keep[0], keep) and solution.values is not None
    torch.testing.assert_close(solution.values[0], values, rtol=1e-9, atol=1e-9)
    assert (solution.values[0][~keep] == 0).all()
    control = SparseGPTMask(block=block).solve(weight[None], parse(pattern), seen(x, "hessian"), "w")
    assert torch.equal(control.keep, solution.keep) and control.values is None


def test_one_weight_is_made_up_for_by_least_squares() -> None:
    x = correlated(100, 2).double()
    weight = torch.tensor([[[1e-3, 1.0]]]).double()
    solution = SparseGPT(dampening=1e-12).solve(weight, parse("1:2"), seen(x, "hessian"), "w")
    best = torch.linalg.lstsq(x[:, 1:], x @ weight[0, 0, :, None]).solution
    assert solution.values is not None and solution.values.flatten().tolist() == pytest.approx([0.0, best.item()])


@in_turn("pattern", PATTERNS)
def test_the_update_beats_the_mask_alone_and_that_beats_magnitude(pattern: str) -> None:
    width = 240
    weight = random(1, 32, width, seed=9)
    x = (correlated(2000, width, seed=3, rank=60) + random(2000, width)) * torch.logspace(-1, 1, width)
    errors = []
    for criterion in (SparseGPT(), SparseGPTMask(), Magnitude()):
        statistics = seen(x, "hessian")
        solution = criterion.solve(weight, parse(pattern), statistics, "w")
        values = (weight if solution.values is None else solution.values).masked_fill(~solution.keep, 0)
        errors.append(statistics.error(weight, values))
        direct = (x @ (weight - values)[0].T).double().norm() / (x @ weight[0].T).double().norm()
        assert errors[-1] == pytest.approx(direct.item(), rel=1e-3)
    assert errors[0] < 0.95 * errors[1] and errors[1] < errors[2]


def test_dead_inputs_are_pruned_first_and_left_alone_when_kept() -> None:
    weight = random(1, 4, 8, seed=2)
    x = correlated(50, 8)
    x[:, :3] = 0
    solution = SparseGPT().solve(weight, parse("2:4"), seen(x, "hessian"), "w")
    keep, values = solution.keep[0], solution.values
    assert values is not None and keep[:, 3].all() and (keep[:, :3].sum(1) == 1).all()
    largest = weight[0, :, :3].abs().argmax(1)
    assert torch.equal(keep[:, :3].int().argmax(1), largest)
    assert torch.equal(values[0, :, :3][keep[:, :3]], weight[0, :, :3][keep[:, :3]])


def test_data_of_low_rank_or_none_at_all() -> None:
    for x in (correlated(3, 32), correlated(100, 32, rank=2), torch.zeros(5, 32)):
        solution = SparseGPT().solve(random(1, 8, 32), parse("2:4"), seen(x, "hessian"), "w")
        assert solution.values is not None and torch.isfinite(solution.values).all()
        assert parse("2:4").check(solution.values).ok


def test_grouped_matrices_have_their_own_hessians() -> None:
    weight, x = random(2, 4, 16), random(2, 60, 16, seed=1)
    both = Statistics("hessian")
    both.add(x)
    solution = SparseGPT().solve(weight, parse("2:4"), both, "w")
    for group in range(2):
        alone = SparseGPT().solve(weight[group : group + 1], parse("2:4"), seen(x[group], "hessian"), "w")
        assert torch.equal(solution.keep[group], alone.keep[0])
        assert solution.values is not None and alone.values is not None
        torch.testing.assert_close(solution.values[group], alone.values[0], rtol=1e-4, atol=1e-5)


def test_the_dampening_doubles_until_the_factor_exists(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "twofour.criteria")
    statistics = Statistics("hessian", rows=1, hessian=torch.tensor([[[1.0, 1.05], [1.05, 1.0]]]))
    found = factor(statistics, 0, 0.01, "fc.weight")
    assert found.damping == pytest.approx(0.08)
    assert "`fc.weight`: the Hessian has no Cholesky factor; dampening doubled to 0.02" in caplog.text
    hopeless = Statistics("hessian", rows=1, hessian=torch.tensor([[[1.0, 1e30], [1e30, 1.0]]]))
    with pytest.raises(
        RecipeError, match=r"layer `fc.weight`: the Hessian .* no Cholesky factor\n.*\n.*\n  try .*0\.1"
    ):
        factor(hopeless, 0, 0.01, "fc.weight")


@pytest.mark.parametrize("text", ["sparsegpt:dampening=0", "sparsegpt-mask:block=0"])
def test_impossible_options(text: str) -> None:
    with pytest.raises(RecipeError, match=r"SparseGPT's options cannot be used\n  got +dampening="):
        criteria.parse(text)


def test_the_same_bits_every_time() -> None:
    weight, x = random(1, 16, 64), correlated(100, 64)
    first, second = (SparseGPT().solve(weight, parse("2:4"), seen(x, "hessian"), "w") for _ in range(2))
    assert first.values is not None and second.values is not None and torch.equal(first.values, second.values)
