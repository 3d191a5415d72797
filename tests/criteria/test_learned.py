"""Learned masks: the candidates, a choice that can be told beforehand, and the loss they are trained for."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import twofour
from twofour import criteria, masks
from twofour.criteria import Learned
from twofour.criteria.learned import candidates
from twofour.errors import DataError, RecipeError
from twofour.patterns import parse


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize(("pattern", "count"), [("2:4", 6), ("1:4", 4), ("4:8", 70), ("1:16", 16), ("4:8-pairs", 6)])
def test_candidates(pattern: str, count: int) -> None:
    found = candidates(parse(pattern), "w")
    chosen = parse(pattern)
    assert len(found) == count == len({tuple(row.tolist()) for row in found})
    assert (found.sum(1) == round(chosen.density * chosen.group)).all()
    assert chosen.check(found.to(torch.uint8)).ok


@pytest.mark.parametrize("pattern", ["8:16", "16:2:8"])
def test_patterns_with_too_many_candidates_are_refused(pattern: str) -> None:
    model = nn.Linear(32, 32)
    got = f"{math.comb(16, 8)} candidates" if pattern == "8:16" else "groups depend on each other"
    with pytest.raises(RecipeError, match=rf"layer `weight`: masks of the pattern {pattern} cannot .*\n  got .*{got}"):
        twofour.prune(model, pattern, criterion="learned", data=[(torch.ones(1, 32),) * 2], loss=squared)


def test_the_inputs_that_matter_are_found() -> None:
    """Of each four inputs the two with the smallest weights are all that vary: only the loss can tell."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 0.5, 0.8, 0.6]).repeat(16, 4) * torch.randn(16, 16).sign())
    x = torch.randn(64, 16) * torch.tensor([0.0, 1, 0, 1]).repeat(4)
    data = [(x, layer(x).detach())]
    dense = copy.deepcopy(layer.state_dict())
    twofour.prune(layer, "2:4", criterion="learned:steps=80", data=data, loss=squared)
    assert torch.equal(masks.of(layer)["weight"].keep, torch.tensor([False, True] * 8).expand(16, 16))
    kept = masks.of(layer)["weight"].keep
    assert torch.equal(layer.weight[kept], dense["weight"][kept])
    assert twofour.pruning.outcomes(layer)[0].error == pytest.approx(0, abs=1e-6)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 16))


def data(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(128, 16, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return [(part, model(part)) for part in x.split(64)]


def test_the_loss_is_lower_than_magnitudes_and_the_model_unharmed() -> None:
    dense = network().train()
    pairs = data(dense)
    losses = {}
    for name in ("magnitude", "learned:steps=60"):
        model = copy.deepcopy(dense)
        model[0].bias.requires_grad_(False)
        twofour.prune(model, "2:4", criterion=name, data=pairs, loss=squared if name != "magnitude" else None)
        losses[name] = sum(squared(model(x), y).item() for x, y in pairs)
        assert model.training and model[0].weight.requires_grad and not model[0].bias.requires_grad
        assert all(parameter.grad is None for parameter in model.parameters())
    assert losses["learned:steps=60"] < 0.8 * losses["magnitude"]


def test_the_same_seed_learns_the_same_masks() -> None:
    found = []
    for seed in (0, 0, 1):
        model = network()
        twofour.prune(model, "4:8", criterion=Learned(steps=3, prior=0, seed=seed), data=data(model), loss=squared)
        found.append(masks.of(model)["3.weight"].keep)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_training_that_ends_worse_than_it_started_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    """A rate far too large scatters the masks: those of magnitude, where the logits start, are kept."""
    model = network()
    pairs = [pair for x, y in data(model) for pair in zip(x.split(8), y.split(8), strict=True)]
    best = copy.deepcopy(model)
    twofour.prune(best, "2:4")
    criterion = Learned(steps=4, rate=50.0, temperature=0.1)
    twofour.prune(model, "2:4", criterion=criterion, data=pairs, loss=squared)
    for name, mask in masks.of(model).items():
        assert torch.equal(mask.keep, masks.of(best)[name].keep)
    assert "the first ones are kept" in caplog.text


class Twice(nn.Module):
    """One module under two names, and one parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(16, 16)
        self.c, self.d = nn.Linear(16, 16), nn.Linear(16, 16)
        self.d.weight = self.c.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).tanh()).tanh()).tanh())


def test_weights_in_two_places_are_masked_in_both_and_come_back() -> None:
    torch.manual_seed(0)
    model = Twice()
    parameters, x, seen = list(model.parameters()), torch.randn(4, 16), set[tuple[int, int]]()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.add((id(model.a.weight) - id(model.b.weight), id(model.c.weight) - id(model.d.weight)))
        return squared(output, target)

    model.d.register_forward_pre_hook(lambda module, _: seen.add((0, int(module.weight is not model.c.weight))))
    twofour.prune(model, "2:4", criterion="learned:steps=3", data=[(x, x)], loss=loss)
    assert seen == {(0, 0)} and [*map(id, model.parameters())] == [*map(id, parameters)]
    torch.optim.SGD(model.parameters(), 0.1)
    assert twofour.check(model).ok and set(masks.of(model)) == {"a.weight", "c.weight"}


def test_errors() -> None:
    with pytest.raises(RecipeError, match=r"options of learned masks cannot be used\n  got +steps=0"):
        criteria.parse("learned:steps=0")
    model = network()
    with pytest.raises(RecipeError, match=r'"learned" needs a loss'):
        twofour.prune(model, "2:4", criterion="learned", data=data(model))
    with pytest.raises(DataError, match=r"the loss cannot be used\n  got +Tensor nan"):
        twofour.prune(model, "2:4", criterion="learned", data=data(model), loss=lambda y, _: y.sum() * torch.nan)
    assert not masks.of(model) and model[0].weight.requires_grad
