"""What ranks blocks: norms of their values' scores, and over the whole model, against brute force."""

from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import twofour
from twofour import allocation, criteria, masks, streaming
from twofour.checkpoints import Checkpoint
from twofour.criteria.base import NORMS
from twofour.criteria.shares import LEAST, shares
from twofour.errors import PatternError, RecipeError
from twofour.patterns import Block
from twofour.recipe import Recipe
from twofour.training import gradual


def net(scale: float = 8.0) -> nn.Sequential:
    """A second layer whose weights are larger: over the model it keeps more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 18))
    with torch.no_grad():
        model[2].weight.mul_(scale)  # pyright: ignore
    return model


def used(mask: masks.Mask) -> Tensor:
    assert isinstance(mask.pattern, Block)
    return mask.pattern.blocks(mask.keep).flatten(-2).any(-1)


def brute(scores: Tensor, pattern: Block, norm: str) -> list[float]:
    """The rank of each block by Python's own loops, in the order of rows of blocks."""
    found = []
    for top in range(0, scores.shape[0], pattern.r):
        for left in range(0, scores.shape[1], pattern.c):
            values = scores[top : top + pattern.r, left : left + pattern.c].double().abs().flatten().tolist()
            count = len(values)
            means = {"l1": sum(values) / count, "l2": (sum(v * v for v in values) / count) ** 0.5, "max": max(values)}
            found.append(means[norm])
    return found


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 11), st.integers(1, 13), st.integers(1, 4), st.integers(2, 5),
    st.sampled_from(NORMS), st.integers(0, 999),
)  # fmt: skip
def test_norms_against_brute_force(rows: int, columns: int, r: int, c: int, norm: str, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    pattern = Block(r, c, 0.5)
    expected = torch.tensor(brute(weight, pattern, norm), dtype=torch.float32)
    torch.testing.assert_close(pattern.ranks(weight, norm, absolute=True).flatten(), expected)
    torch.testing.assert_close(pattern.ranks(weight.abs(), norm).flatten(), expected)


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_blocks_of_dead_inputs_come_last_among_themselves_by_what_they_hold(norm: str) -> None:
    scores = torch.tensor([[-0.9, -0.8, -0.2, -0.1, 0.0, 0.5, -0.1, 0.3]])  # a dead input's score is negative
    ranks = Block(1, 2, 0.5).ranks(scores, norm).flatten()
    assert ranks.argsort(descending=True).tolist() == [2, 3, 1, 0]


@pytest.mark.parametrize("norm", NORMS)
def test_the_norm_of_a_criterion_decides_which_blocks_stay(norm: str) -> None:
    model = net()
    expected = {
        name: Block(4, 4, 0.6).best(torch.tensor(brute(p.detach(), Block(4, 4, 0.6), norm)))
        for name, p in model.named_parameters()
        if p.ndim == 2
    }
    pruned = twofour.prune(model, "block:4x4@0.6", criterion=f"magnitude:norm={norm}", eligibility="any")
    for name, mask in masks.of(pruned).items():
        assert torch.equal(used(mask).flatten(), expected[name]), name
    assert {outcome.criterion for outcome in twofour.pruning.outcomes(pruned)} == {
        criteria.parse(f"magnitude:norm={norm}").name
    }


def test_over_the_model_the_best_blocks_of_all_weights_stay_and_each_keeps_some() -> None:
    model = net()
    ranks = {n: brute(p.detach(), Block(4, 4, 0.7), "max") for n, p in model.named_parameters() if p.ndim == 2}
    pruned = twofour.prune(model, "block:4x4@0.7", criterion="magnitude:over=model", eligibility="any")
    kept = {name: used(mask).flatten() for name, mask in masks.of(pruned).items()}
    alone = {name: len(r) - Block(4, 4, 0.7).zeros(len(r)) for name, r in ranks.items()}
    assert sum(int(k.sum()) for k in kept.values()) == sum(alone.values())
    assert int(kept["2.weight"].sum()) > 2 * alone["2.weight"], "its values are eight times the others'"
    for name, mask in masks.of(pruned).items():
        pattern = mask.pattern
        assert isinstance(pattern, Block) and int(kept[name].sum()) == len(kept[name]) - pattern.zeros(len(kept[name]))
        assert int(kept[name].sum()) >= ceil(LEAST * alone[name])
        worst_kept = min(rank for rank, stays in zip(ranks[name], kept[name], strict=True) if stays)
        assert all(rank <= worst_kept for rank, stays in zip(ranks[name], kept[name], strict=True) if not stays)
    assert twofour.check(pruned).ok


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 100)), min_size=1, max_size=5), st.floats(0, 0.99))
def test_shares_against_brute_force(sizes: list[tuple[int, float]], sparsity: float) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    ranks = [scale * torch.rand(count, generator=generator) for count, scale in sizes]
    found = shares([Block(2, 2, sparsity)] * len(ranks), ranks)
    alone = [len(r) - Block(2, 2, sparsity).zeros(len(r)) for r in ranks]
    least = [ceil(LEAST * count) for count in alone]
    kept = list(least)
    rest = sorted(
        ((float(v), i) for i, r in enumerate(ranks) for v in r.sort(descending=True).values[least[i] :]), reverse=True
    )
    for _, i in rest[: sum(alone) - sum(least)]:
        kept[i] += 1
    assert [len(r) - pattern.zeros(len(r)) for pattern, r in zip(found, ranks, strict=True)] == kept


@pytest.mark.parametrize(
    "criterion", ["wanda:norm=l2", "sparsegpt:", "admm:steps=3", "taylor:norm=l1", "random:seed=2"]
)
def test_every_criterion_ranks_over_the_model(criterion: str) -> None:
    inputs = torch.randn(64, 24, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = (
        {"loss": lambda output, target: (output - target).square().mean()} if criterion[0] == "t" else {}
    )
    data = [(inputs, inputs[:, :18])] if given else [inputs]
    text = criterion.rstrip(":") + ("," if "=" in criterion else ":") + "over=model"
    pruned = twofour.prune(
        net(), "block:4x4@0.7", criterion=text, data=data, eligibility="any", progress=False, **given
    )
    found = masks.of(pruned)
    alone = sum(used(mask).numel() - Block(4, 4, 0.7).zeros(used(mask).numel()) for mask in found.values())
    assert sum(int(used(mask).sum()) for mask in found.values()) == alone
    if criterion[0] != "r":
        assert len({mask.pattern for mask in found.values()}) == 3, "each has a share of its own"
    assert twofour.check(pruned).ok


def test_other_patterns_are_as_they_were_beside_blocks_over_the_model() -> None:
    rules = {"0": "2:4", "2": "block:4x4@0.5", "4": "block:4x4@0.5"}
    pruned = twofour.prune(net(), rules, criterion="magnitude:over=model", eligibility="any")
    names = {name: mask.pattern.name for name, mask in masks.of(pruned).items()}
    assert names["0.weight"] == "2:4" and names["2.weight"] != names["4.weight"]


def test_a_recipe_keeps_the_options_in_its_file(tmp_path: Path) -> None:
    recipe = Recipe.parse("block:4x4@0.5", criterion="magnitude:over=model,norm=l1")
    recipe.save(tmp_path / "recipe.toml")
    assert Recipe.load(tmp_path / "recipe.toml") == recipe and '"magnitude:over=model,norm=l1"' in recipe.to_toml()


def test_levels_over_the_model_end_there_and_never_grow_back() -> None:
    model = net()
    schedule = gradual.attach(
        model, "block:4x4@0.8", begin=0, end=8, criterion="magnitude:over=model", eligibility="any"
    )
    before: dict[str, Tensor] = {}
    for _ in range(8):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
            for name, mask in masks.of(model).items():
                mask.parameter.mul_(mask.keep)
                assert name not in before or not bool((mask.keep & ~before[name]).any())
                before[name] = mask.keep.clone()
        schedule.step()
    found = masks.of(schedule.finish())
    assert len({mask.pattern for mask in found.values()}) == 3
    zeros = [(used(mask), Block(4, 4, 0.8)) for mask in found.values()]
    assert sum(int(u.sum()) for u, _ in zeros) == sum(u.numel() - p.zeros(u.numel()) for u, p in zeros)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magnitude:norm=l3", 'the norm of a block is not known.*"l1" or "l2" or "max"'),
        ("sparsegpt:over=layer", 'the range of a ranking is not known.*"weight" or "input" or "model"'),
        ("sparsegpt:norm=max", "has no such option"),
    ],
)
def test_impossible_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        criteria.parse(text)


def test_a_ranking_over_the_model_is_refused_where_there_is_nothing_to_rank(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nothing can be ranked over the model"):
        twofour.prune(net(), "2:4", criterion="magnitude:over=model", eligibility="any")
    with pytest.raises(RecipeError, match="that of the layer alone"):
        allocation.sensitivity(net(), [torch.randn(8, 24)], ["block:4x4@0.5"], criterion="wanda:over=model")
    save_file({"a": torch.randn(16, 16)}, tmp_path / "w.safetensors")
    recipe = Recipe.parse("block:4x4@0.5", criterion="magnitude:over=model")
    with pytest.raises(RecipeError, match="pruned weight by weight"):
        streaming.plan_file(Checkpoint.open(tmp_path / "w.safetensors"), recipe, [("*", 1)])


def test_weights_that_cannot_be_ranked_are_named() -> None:
    model = net()
    with torch.no_grad():
        model[2].weight[3, 5] = float("nan")  # pyright: ignore
    with pytest.raises(PatternError, match=r"(?s)2.weight.*the first nan at \(3, 5\)"):
        twofour.prune(model, "block:4x4@0.5", criterion="magnitude:over=model", eligibility="any")
    assert not masks.of(model)
