"""`finetune(..., scheme=)`: a dense model in, a sparse one out, in one call; it stops and goes on to the same bits."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.training.small import dense_model, noisy_loader, recipe, same_state
from twofour import masks
from twofour.errors import TrainingError
from twofour.layers import describe_attached
from twofour.patterns import Block
from twofour.training import Scheme, block_thresholds, gradual, sr_ste, train

PATTERN = "block:4x4@0.7"


def by_levels(model: nn.Module, steps: int) -> Scheme:
    return gradual.during(PATTERN, eligibility="any")(model, steps)


def by_thresholds(model: nn.Module, steps: int) -> Scheme:
    return block_thresholds.during((4, 4), lasso=1e-3, factor=0.7)(model, steps)


def by_ste(model: nn.Module, steps: int) -> Scheme:
    return sr_ste.attach(model, "2:4", eligibility="any")


SCHEMES = {"levels": by_levels, "thresholds": by_thresholds, "ste": by_ste}


def test_one_line_prunes_while_it_trains_and_compares_with_a_dense_control() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    control = copy.deepcopy(model)
    result = twofour.finetune(model, noisy_loader(), **recipe(epochs=4), control=control, scheme="block:8x4@0.5")
    found = masks.of(model)
    assert list(found) == ["0.weight", "2.weight"] and not masks.of(control)
    for mask in found.values():
        assert mask.pattern == Block(8, 4, 0.5) and mask.density == 0.5
    assert not describe_attached(model) and twofour.check(model).ok
    assert result.control is not None and result.sparse.history[-1].loss < result.sparse.history[0].loss


def test_the_levels_end_at_half_of_the_steps() -> None:
    model, seen = dense_model(), []

    def watched(model: nn.Module, steps: int) -> Scheme:
        scheme = by_levels(model, steps)
        assert isinstance(scheme, gradual.Gradual)
        step = scheme.step
        scheme.step = lambda: (step(), seen.append(scheme.now))[0]  # type: ignore[method-assign]
        return scheme

    twofour.finetune(model, noisy_loader(), **recipe(epochs=2), scheme=watched)
    final = Block(4, 4, 0.7)
    assert len(seen) == 12 and seen[4] != final and all(now == final for now in seen[5:])


@pytest.mark.parametrize("name", SCHEMES)
def test_a_run_that_was_stopped_ends_with_the_same_bits(name: str, tmp_path: Path, monkeypatch) -> None:
    options: dict[str, Any] = {**recipe(epochs=3), "scheme": SCHEMES[name]}
    whole, stopped, resumed = dense_model(), dense_model(), dense_model()
    twofour.finetune(whole, noisy_loader(), **options)
    calls = itertools.count()

    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if next(calls) == 10:
            raise KeyboardInterrupt
        return nn.functional.cross_entropy(output, target)

    with pytest.raises(KeyboardInterrupt):
        kept: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": 2}
        twofour.finetune(stopped, noisy_loader(), **{**options, "loss": failing}, **kept)
    assert not describe_attached(stopped), "nobody but the run held the scheme"
    twofour.finetune(resumed, noisy_loader(), **options, **kept)
    assert same_state(whole, resumed) and same_masks(whole, resumed) and masks.of(resumed)
    again = dense_model()
    twofour.finetune(again, noisy_loader(), **options, **kept)  # the run is over: its end is loaded
    assert same_state(whole, again) and same_masks(whole, again)


def same_masks(one: nn.Module, other: nn.Module) -> bool:
    a, b = masks.of(one), masks.of(other)
    return a.keys() == b.keys() and all(torch.equal(a[name].keep, b[name].keep) for name in a)


def test_a_checkpoint_of_another_scheme_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {**recipe(), "checkpoint": tmp_path}
    twofour.finetune(dense_model(), noisy_loader(), **options, scheme=by_levels)
    before = (tmp_path / "sparse.pt").read_bytes()
    for other in (by_thresholds, gradual.during("block:4x4@0.6", eligibility="any")):
        model = dense_model()
        with pytest.raises(TrainingError, match="is of another run"):
            twofour.finetune(model, noisy_loader(), **options, scheme=other)
        assert not describe_attached(model) and not masks.of(model)
    assert (tmp_path / "sparse.pt").read_bytes() == before


def test_the_lasso_pulls_until_the_schedule_ends_and_not_after() -> None:
    model, terms = dense_model(), []

    def watched(model: nn.Module, steps: int) -> Scheme:
        scheme = block_thresholds.during((4, 4))(model, steps)
        assert isinstance(scheme, block_thresholds.BlockThresholds) and scheme.lasso == block_thresholds.LASSO
        penalty = scheme.penalty
        scheme.penalty = lambda: terms.append(penalty()) or terms[-1]  # type: ignore[method-assign]
        return scheme

    twofour.finetune(model, noisy_loader(), **recipe(epochs=4), scheme=watched)
    end = block_thresholds.Rise.during(24).end
    assert [float(term.detach()) > 0 for term in terms] == [True] * end + [False] * (24 - end)


@pytest.mark.parametrize("side", [2, 4, 8, 16])
def test_the_lasso_pulls_at_each_value_as_strongly_whatever_the_block(side: int) -> None:
    """The gradient of sqrt(N) ||w|| is sqrt(N) w / ||w||, which is w over its root mean square: 1 for equal values."""
    weight = torch.full((32, 32), 0.3, requires_grad=True)
    block_thresholds.group_lasso(weight, Block(side, side, 0.5)).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.ones(32, 32))


@pytest.mark.parametrize("steps", [1, 2, 7, 100, 12345])
def test_the_rise_during_a_run_of_any_length(steps: int) -> None:
    rise = block_thresholds.Rise.during(steps)
    assert 1 <= rise.start <= rise.ramp <= rise.end <= max(1, steps // 2) and 1 <= rise.every <= 100


def test_refusals() -> None:
    model, _ = dense_model(), None
    with pytest.raises(TrainingError, match="`scheme` cannot be called"):
        twofour.finetune(model, noisy_loader(), **recipe(), scheme=3)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="`scheme` returns something else"):
        twofour.finetune(model, noisy_loader(), **recipe(), scheme=lambda model, steps: model)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="defined for N:M and for blocks"):
        twofour.finetune(model, noisy_loader(), **recipe(), scheme="64:2:8")
    with pytest.raises(TrainingError, match="masked already"):
        masked = twofour.prune(dense_model(), "2:4", eligibility="any")
        twofour.finetune(masked, noisy_loader(), **recipe(), scheme=by_levels)

    class Endless:
        def __iter__(self) -> Any:
            return iter(noisy_loader())

    with pytest.raises(TrainingError, match="how many steps there will be"):
        twofour.finetune(model, Endless(), **recipe(), scheme=by_levels)  # type: ignore[arg-type]
    assert not describe_attached(model)
    train(model, noisy_loader(), **recipe(epochs=1))
