"""Blocks pruned level by level: the cubic rise against a table, masks that never grow back, resume, gates."""

import itertools

import pytest
import torch
from torch import nn

from twofour import masks
from twofour.errors import TrainingError
from twofour.patterns import Block
from twofour.training import gradual


def recurrent(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.GRU(12, 20, batch_first=True)


def trained(model: nn.Module, schedule: gradual.Gradual, steps: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Train on noise; return the masks after each step."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen = []
    for _ in range(steps):
        optimiser.zero_grad()
        model(torch.randn(3, 5, 12, generator=generator))[0].square().mean().backward()
        optimiser.step()
        schedule.step()
        seen.append({name: mask.keep.clone() for name, mask in masks.of(model).items()})
    return seen


def test_the_share_of_zeros_rises_as_zhu_and_gupta_say() -> None:
    schedule = gradual.attach(recurrent(), "block:4x4@0.8", begin=2, end=6, eligibility="any")
    table = [(3, 0.4625), (4, 0.7), (5, 0.7875), (6, 0.8)]
    assert [(step, pattern.sparsity) for step, pattern in schedule.levels] == table
    assert len(gradual.attach(recurrent(), "block:4x4@0.8", end=10**6, eligibility="any").levels) == 100


def test_masks_never_grow_back_and_end_as_asked() -> None:
    model = recurrent()
    schedule = gradual.attach(model, "block:8x4@0.75", end=8, eligibility="any")
    seen = trained(model, schedule, 12)
    for before, after in itertools.pairwise(seen):
        assert all(not bool((after[name] & ~keep).any()) for name, keep in before.items())
    schedule.finish()
    for name, mask in masks.of(model).items():
        assert mask.pattern == Block(8, 4, 0.75, 3), name
        blocks = mask.pattern.blocks(model.get_parameter(name) != 0).flatten(-2).any(-1)
        assert int(blocks.sum()) == blocks.numel() - mask.pattern.zeros(blocks.numel())


def test_a_run_goes_on_where_it_stopped() -> None:
    def attached(model: nn.Module) -> gradual.Gradual:
        return gradual.attach(model, "block:4x4@0.9", begin=1, end=9, eligibility="any")

    whole, half = recurrent(), recurrent()
    first = attached(whole)
    trained(whole, first, 4)
    second = attached(half)
    second.load_state_dict(first.state_dict())
    half.load_state_dict(whole.state_dict())
    assert second.steps == 4 and second.now == first.now
    for one, other in zip(trained(whole, first, 8, seed=1), trained(half, second, 8, seed=1), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("pattern", ["2:4-transposable", "64:2:8"])
def test_other_patterns_have_no_levels(pattern: str) -> None:
    with pytest.raises(TrainingError, match=r"N:M and for blocks(.|\n)*sr_ste"):
        gradual.attach(recurrent(), pattern, end=4)
