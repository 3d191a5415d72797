"""Criteria on block patterns: every one keeps the share that the pattern says, and data make it a better one."""

import pytest
import torch
from torch import nn

import twofour
from tests.turns import in_turn
from twofour import masks
from twofour.errors import RecipeError
from twofour.patterns import Block


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 90), nn.ReLU(), nn.Linear(90, 33))


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(256, 70) @ torch.randn(70, 70) * torch.logspace(-1, 1, 70)


@in_turn("criterion", ["wanda", "ria", "sparsegpt", "sparsegpt-mask", "admm", "sparsegpt:block=16"])
@in_turn("pattern", ["block:8x4@0.6", "block:16x16@0.5", "block:1x7@0.9", "block:7x1@0.35"])
def test_each_keeps_the_pattern_on_odd_sizes(criterion: str, pattern: str) -> None:
    pruned = twofour.prune(model(), pattern, criterion=criterion, data=[inputs()], eligibility="any", progress=False)
    for mask in masks.of(pruned).values():
        rule = mask.pattern
        assert isinstance(rule, Block) and rule.check(mask.keep.float()).ok
        blocks = rule.blocks(mask.keep).flatten(-2).any(-1)
        assert int(blocks.sum()) == blocks.numel() - rule.zeros(blocks.numel())
    assert twofour.check(pruned).ok


def test_criteria_with_a_hessian_lose_less_than_the_magnitude() -> None:
    lost = {}
    for criterion in ("magnitude", "sparsegpt", "admm"):
        pruned = twofour.prune(
            model(), "block:4x4@0.5", criterion=criterion, data=[inputs()], eligibility="any", progress=False
        )
        lost[criterion] = twofour.pruning.outcomes(pruned)[0].error
    assert lost["admm"] <= lost["sparsegpt"] * (1 + 1e-6), "the same blocks, but for rounding"
    assert lost["sparsegpt"] < 0.8 * lost["magnitude"]


def test_blocks_that_grouped_convolutions_cut_are_refused() -> None:
    convolution = nn.Sequential(nn.Conv2d(16, 20, 1, groups=2))
    with pytest.raises(RecipeError, match="2 products by a criterion with a Hessian"):
        twofour.prune(
            convolution, "block:4x4@0.5", criterion="sparsegpt", data=[torch.randn(4, 16, 5, 5)], eligibility="any"
        )


def test_a_convolution_whose_blocks_would_reach_over_positions_stays_dense() -> None:
    net = nn.Sequential(nn.Conv2d(6, 8, 3), nn.Conv2d(8, 8, 3))
    kept = masks.of(twofour.prune(net, "block:4x4@0.5", eligibility="any"))
    assert list(kept) == ["1.weight"]
    reasons = [
        skipped.reason
        for skipped in twofour.recipe.Recipe.parse("block:4x4@0.5", eligibility="any").assign(net).skipped
    ]
    assert any("6 inputs at each of 9 positions are no multiple of 4" in reason for reason in reasons)
