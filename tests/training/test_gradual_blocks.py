"""Blocks pruned level by level: the cubic rise against a table, masks that never grow back, resume, gates."""

import itertools

import pytest
import torch
from torch import nn

import twofour
from twofour import masks
from twofour.errors import TrainingError
from twofour.patterns import Block
from twofour.recipe import Recipe
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


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.tag = nn.GRU(12, 20, batch_first=True), nn.Linear(20, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, h = self.gru(x)
        return self.tag(y), h


def test_a_recipe_gives_each_layer_levels_of_its_own_and_is_resumed() -> None:
    rules = {"gru": "block:4x4@0.8", "tag": "1:4"}

    def made(source: gradual.Patterns) -> tuple[nn.Module, gradual.Gradual]:
        torch.manual_seed(0)
        model = Tagger()
        return model, gradual.attach(model, source, end=6, eligibility="any")

    (whole, first), (half, second) = made(rules), made(rules)
    assert [step for step, _ in first.levels] == sorted(step for step, _ in first.levels) and len(first.layers) == 3
    trained(whole, first, 3)
    assert masks.of(whole)["tag.weight"].pattern.name == "2:4"
    assert masks.of(whole)["gru.weight_hh_l0"].pattern == Block(4, 4, 0.8 * (1 - 0.5**3), 1)
    second.load_state_dict(first.state_dict())
    half.load_state_dict(whole.state_dict())
    trained(whole, first, 4, seed=1), trained(half, second, 4, seed=1)
    found = masks.of(whole)
    assert all(torch.equal(mask.keep, masks.of(half)[name].keep) for name, mask in found.items())
    assert found["tag.weight"].pattern.name == "1:4" and found["gru.weight_ih_l0"].pattern.sparsity == 0.8
    _, other = made(Recipe.parse({"gru": "block:4x4@0.8", "*": "dense"}, criterion="random", eligibility="any"))
    assert other.layers == ("gru.weight_ih_l0", "gru.weight_hh_l0")
    with pytest.raises(TrainingError, match="another gradual schedule"):
        other.load_state_dict(first.state_dict())
    with pytest.raises(TrainingError, match="N:M and for blocks"):
        gradual.during({"gru": "2:4", "tag": "64:2:8"})


def test_shares_that_few_blocks_cannot_reach_are_told(caplog: pytest.LogCaptureFixture) -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    gradual.attach(layers, {"0": "block:32x32@0.9", "1": "block:8x8@0.9"}, end=4).remove()
    (told,) = caplog.messages
    assert "`0.weight` ends with 75.0% of its blocks zero where block:32x32@0.9 asks for 90.0%" in told
    caplog.clear()
    pruned = twofour.prune(layers, {"0": "block:32x32@0.9", "1": "block:8x8@0.9"})
    assert sum("cut into 4 of them" in line for line in caplog.messages) == 1
    assert float((pruned[0].weight == 0).float().mean()) == 0.75  # type: ignore[index]


@pytest.mark.parametrize("pattern", ["2:4-transposable", "64:2:8"])
def test_other_patterns_have_no_levels(pattern: str) -> None:
    with pytest.raises(TrainingError, match=r"N:M and for blocks(.|\n)*sr_ste"):
        gradual.attach(recurrent(), pattern, end=4)
