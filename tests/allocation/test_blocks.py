"""Blocks among the candidates: shares by what layers lose, against the same share for all; gates; times."""

from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from twofour import masks
from twofour.allocation import Budget, allocate, sensitivity, timed, uniform
from twofour.patterns import Block

SHARES = ("dense", *(f"block:4x4@{share}" for share in (0.25, 0.5, 0.75, 0.9)))


def network() -> nn.Sequential:
    """Three quarters of the first layer's blocks are small: it can lose them, and the others need lose less."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    with torch.no_grad():
        model[0].weight.view(8, 4, 8, 4)[2:] *= 0.01  # pyright: ignore
    return model


def test_shares_by_sensitivity_lose_less_than_one_share_for_all() -> None:
    model, x = network(), torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    found = sensitivity(model, x, SHARES, criterion="wanda", progress=False)
    same = uniform(found, "block:4x4@0.5")
    chosen = allocate(found, Budget(density=same.density))
    assert chosen.density <= same.density and chosen.loss < 0.8 * same.loss
    answer = model(x)
    errors = {}
    for name, recipe in (("same", same.recipe), ("chosen", chosen.recipe)):
        pruned = twofour.prune(network(), recipe, data=x, progress=False)
        patterns = {mask.pattern for mask in masks.of(pruned).values()}
        assert all(isinstance(pattern, Block) for pattern in patterns) and twofour.check(pruned).ok
        errors[name] = float((pruned(x) - answer).norm().detach())
    assert errors["chosen"] < errors["same"]


def test_candidates_of_gates_and_of_positions_are_those_that_a_recipe_can_lay() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gates = nn.Conv1d(6, 8, 3, padding=1), nn.LSTM(8, 6, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gates(self.conv(x).transpose(1, 2))[0]

    torch.manual_seed(0)
    data = torch.randn(4, 6, 10)
    found = sensitivity(Both(), data, SHARES, eligibility="any", progress=False)
    assert "conv" not in [layer.layer for layer in found.layers], "6 inputs at a position hold no whole block"
    chosen = allocate(found, Budget(density=0.5))
    pruned = twofour.prune(Both(), chosen.recipe, eligibility="any", progress=False)
    assert {mask.pattern.parts for mask in masks.of(pruned).values() if isinstance(mask.pattern, Block)} == {4}


def test_each_share_has_a_time_of_its_own_or_the_dense_one(times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64)
    found = timed(sensitivity(model, x, ("dense", "block:16x16@0.75"), progress=False), model, x)
    dense, blocks = found.layers[0].candidates
    assert dense.ms is not None and blocks.ms is not None and 0 < blocks.ms <= dense.ms
