"""Orders of channels for blocks: planted blocks are found, what a model computes stays, nothing keeps less."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import twofour
from tests.structure.network_plans import plan
from twofour import layers, masks, patterns
from twofour.errors import KernelError
from twofour.structure import coupling, permutation
from twofour.structure.permutation.blocks import BlockSearch, assign, search_blocks
from twofour.structure.permutation.matrices import Consumer


class Perceptron(nn.Module):
    """Two layers between which channels may move; ends that may not."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


class Attended(nn.Module):
    """Heads, whose values move within each head, and a residual stream that may not leave its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.value, self.out, self.back = (nn.Linear(*s) for s in ((8, 16), (16, 16), (16, 16), (16, 8)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.into(x)
        heads = self.value(y).unflatten(-1, (2, 8)).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads.detach() * 0 + 1, heads * 0 + 1, heads)
        return self.back(y + self.out(mixed.transpose(1, 2).flatten(2)))


def planted(model: Perceptron) -> Tensor:
    """Make half of the hidden channels small, every second one, so that no block is empty before they are sorted."""
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model.first.weight[order[:16]] *= 1e-3
        model.last.weight[:, order[:16]] *= 1e-3
    return order


def kept_squares(model: nn.Module, pattern: str) -> float:
    rule = patterns.parse(pattern)
    kept = total = 0.0
    for weight in layers.walk(model, eligibility="any").weights:
        squares = weight.reduction_last(weight.parameter.detach()).square()
        kept, total = kept + float((squares * rule.project(squares)).sum()), total + float(squares.sum())
    return kept / total


def test_planted_channels_are_found_and_the_model_computes_what_it_did() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    planted(model)
    x = torch.randn(5, 16)
    before, answer = kept_squares(model, "block:8x8@0.5"), model(x)
    report = permutation.permute(model, x, plan(model, "block:8x8@0.5"))
    assert before < 0.75 and kept_squares(model, "block:8x8@0.5") > 0.999
    torch.testing.assert_close(model(x), answer, rtol=1e-4, atol=1e-5)
    (gain,) = [group for group in report.groups if not group.reason]
    assert gain.size == 32 and gain.before == pytest.approx(before, abs=1e-6) and gain.after > 0.999
    assert gain.efficacy > 0.9 and report.magnitude_after > report.magnitude_before


def test_prune_permutes_for_blocks_and_reports_it() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    planted(model)
    x = torch.randn(5, 16)
    answer = model(x)
    pruned = twofour.prune(model, "block:8x8@0.5", permute=True, example=x, eligibility="any")
    report = twofour.pruning.permutation_report(pruned)
    assert report is not None and report.scores_after > report.scores_before + 0.2
    assert all(mask.pattern == patterns.parse("block:8x8@0.5") for mask in masks.of(pruned).values())
    torch.testing.assert_close(pruned(x), answer, rtol=0, atol=5e-2)


def test_heads_keep_their_channels_and_every_sweep_keeps_more() -> None:
    torch.manual_seed(1)
    model, x = Attended(), torch.randn(2, 3, 8)
    answer, before = model(x), kept_squares(model, "block:4x4@0.5")
    report = permutation.permute(model, x, plan(model, "block:4x4@0.5"))
    torch.testing.assert_close(model(x), answer, rtol=1e-4, atol=1e-5)
    assert {(gain.blocks, gain.size) for gain in report.groups} == {(1, 16), (2, 8)}
    assert kept_squares(model, "block:4x4@0.5") > before
    report.undo()
    assert kept_squares(model, "block:4x4@0.5") == pytest.approx(before, abs=1e-6)


def test_no_turn_keeps_less() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(4)))
    traced = coupling.trace(
        model,
        twofour.capture.arguments(model, (torch.randn(2, 24),), {}),
        layers.walk(model, eligibility="any").weights,
    )
    consumers = [
        Consumer(weight, pattern, weight.parameter.detach().abs()) for weight, pattern in plan(model, "block:4x3@0.6")
    ]
    search = BlockSearch(consumers, traced.groups)
    seen = [search.kept()]
    for _ in range(3):
        for index in range(len(traced.groups)):
            search._turn(index)
            seen.append(search.kept())
    assert len(traced.groups) == 3 and all(b >= a - 1e-9 for a, b in itertools.pairwise(seen)) and seen[-1] > seen[0]
    orders, gains = search_blocks(consumers, traced.groups)
    assert all(order.sort(1).values.tolist() == [list(range(24))] for order in orders)
    assert all(gain.after > gain.before for gain in gains)


def test_where_two_patterns_meet_the_one_along_the_axis_decides() -> None:
    torch.manual_seed(0)
    model, x = Perceptron(), torch.randn(4, 16)
    rules: dict[str, patterns.Pattern] = {"first": patterns.parse("block:8x8@0.5"), "last": patterns.parse("2:4")}
    pairs = [(weight, rules[weight.layer]) for weight in layers.walk(model, eligibility="any").weights]
    report = permutation.permute(model, x, pairs)
    assert [gain.consumers for gain in report.groups] == [("last.weight",)]
    assert report.groups[0].after > report.groups[0].before  # of 2:4, searched by stripes


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(groups: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=groups), nn.Conv2d(16, 8, 1)
    ).eval()
    x = torch.randn(2, 8, 9, 9)
    answer = model(x)
    report = permutation.permute(model, x, plan(model, "block:4x4@0.5"))
    torch.testing.assert_close(model(x), answer, rtol=1e-4, atol=1e-5)
    assert any(gain.after > gain.before for gain in report.groups)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 999), st.booleans())
def test_assignments_against_all_orders(size: int, seed: int, tied: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    gains = torch.randint(0, 3, (size, size), generator=generator).float() if tied else torch.randn(size, size)
    columns = assign(gains)
    assert columns.sort().values.tolist() == list(range(size))
    best = max(sum(float(gains[i, j]) for i, j in enumerate(order)) for order in itertools.permutations(range(size)))
    assert float(gains[torch.arange(size), columns].double().sum()) == pytest.approx(best, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    "gains", [torch.randn(3, 4), torch.full((3, 3), float("nan")), torch.tensor([[1.0, float("inf")], [0, 0]])]
)
def test_gains_that_are_none_are_refused(gains: Tensor) -> None:
    with pytest.raises(KernelError, match=r"as many rows as columns|finite values"):
        assign(gains)
