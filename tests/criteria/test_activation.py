"""Wanda, RIA, Taylor and random against their formulas in float64."""

import pytest
import torch
from torch import Tensor

from tests.turns import in_turn
from twofour import criteria
from twofour.calibration import Statistics
from twofour.criteria import RIA, Random, Scored, Taylor, Wanda
from twofour.errors import RecipeError
from twofour.patterns import parse

PATTERNS = ("2:4", "1:2", "1:4", "4:8", "8:16", "3:5", "4:8-pairs")


def seen(x: Tensor, need="norms") -> Statistics:
    """Statistics of inputs (rows, in), in two batches."""
    statistics = Statistics(need)
    for part in x.unsqueeze(0).tensor_split(2, dim=1):
        statistics.add(part)
    return statistics


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@in_turn("pattern", PATTERNS)
@in_turn("criterion", [Wanda(), RIA(), RIA(power=0.25)], ids=str)
def test_against_the_formula(criterion: Scored, pattern: str) -> None:
    weight, x = random(6, 240), random(50, 240, seed=1) * torch.logspace(-2, 2, 240)
    keep = criterion.solve(weight[None], parse(pattern), seen(x), "w").keep[0]
    size, norms = weight.double().abs(), (x.double() ** 2).sum(0).sqrt()
    if isinstance(criterion, RIA):
        scores = (size / size.sum(1, keepdim=True) + size / size.sum(0, keepdim=True)) * norms**criterion.power
    else:
        scores = size * norms
    assert torch.equal(keep, parse(pattern).project(scores))


@pytest.mark.parametrize("criterion", [Wanda(), RIA()], ids=str)
def test_dead_inputs_go_first_and_among_themselves_by_magnitude(criterion: Scored) -> None:
    weight = torch.tensor([[[9.0, 1, 2, 0.1, 3, 1, 2, 4]]])
    x = torch.ones(10, 8) * torch.tensor([0.0, 1, 2, 0.1, 0, 0, 0, 1])
    keep = criterion.solve(weight, parse("2:4"), seen(x), "w").keep
    assert keep.flatten().tolist() == [False, True, True, False, True, False, False, True]


def test_huge_inputs_stay_in_range() -> None:
    x = random(100, 8) * 1e18
    assert torch.isfinite(Wanda().score(random(1, 4, 8), seen(x))).all()
    assert torch.isfinite(RIA().score(torch.zeros(1, 4, 8), seen(x))).all(), "a weight of zeros has no row sum"


def test_taylor_ranks_by_weight_times_gradient() -> None:
    weight, slope = random(1, 4, 8), random(1, 4, 8, seed=1)
    statistics = Statistics("gradients", gradient=slope.abs())
    keep = Taylor().solve(weight, parse("2:4"), statistics, "w").keep
    assert torch.equal(keep, parse("2:4").project((weight * slope).double().abs()))


def test_taylor_ranks_values_without_a_gradient_last_and_by_magnitude() -> None:
    weight = torch.tensor([[[1.0, 9, 3, -4, 1, 2, -8, 4], [1, -2, 3, 4, 5, 6, 7, 8]]])
    slope = torch.tensor([[[1e-3, 0, 0, 0, 0, 0, 0, 1e-9], [0.0] * 8]])
    for pattern, kept in (("2:4", "11000011 00110011"), ("4:2:8", "01000010 00000011")):
        keep = Taylor().solve(weight, parse(pattern), Statistics("gradients", gradient=slope), "w").keep
        if pattern == "2:4":
            assert ["".join(str(int(value)) for value in row) for row in keep[0]] == kept.split()
        else:  # sums over the rows of a block: what has a gradient outweighs all that have none
            assert keep[0, 0, [0, 7]].all()
    none = Taylor().solve(weight, parse("2:4"), Statistics("gradients", gradient=slope * 0), "w").keep
    assert torch.equal(none, parse("2:4").project(weight, absolute=True))


def test_random_follows_seed_and_name() -> None:
    weight = random(1, 64, 64)

    def keep(seed: int, name: str) -> Tensor:
        return Random(seed).solve(weight, parse("2:4"), None, name).keep

    assert torch.equal(keep(0, "a"), keep(0, "a"))
    assert not torch.equal(keep(0, "a"), keep(1, "a")) and not torch.equal(keep(0, "a"), keep(0, "b"))
    counts = keep(0, "a").view(-1, 4).float().mean(0)
    assert ((counts - 0.5).abs() < 0.06).all(), "no position is favoured"


def test_options_in_text() -> None:
    assert criteria.parse("ria:power=0.25") == RIA(0.25)
    assert criteria.parse("random: seed=3") == Random(3)
    for name in criteria.NAMES:
        assert criteria.parse(name).name == name
    for text in ("sparsegpt:dampening=0.05,block=64", "random:seed=7"):
        assert criteria.parse(text).name == text and criteria.parse(criteria.parse(text).name) == criteria.parse(text)
    with pytest.raises(RecipeError, match=r"'wanda' has no such option\n  got +'a=1'"):
        criteria.parse("wanda:a=1")
    with pytest.raises(ValueError, match=r"no such option\n  got +'seed'\n  wanted +over=weight, norm=max, seed=0"):
        criteria.parse("random:seed")
    with pytest.raises(ValueError, match=r"option `seed` .* cannot be read\n  got +'x'\n  wanted +a whole number"):
        criteria.parse("random:seed=x")
