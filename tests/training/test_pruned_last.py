"""The trained control, pruned last: when it stands instead of the sparse run's best state, and what is left early."""

import dataclasses
import functools
import json
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.training.default import QUICK, quick, trained
from tests.training.small import CLASSES, WIDTH, Noisy, accuracy, noisy_loader, same_state
from twofour import masks, pruning
from twofour.errors import PatternError
from twofour.training import judge, pruned_last, randomness, warm_start

HARD = {"pattern": "1:16", "prune": {**QUICK, "criterion": "magnitude"}, "epochs": 4}
"""What a training under the mask mends and one before it does not."""


def run(model, **changes):
    held = {} if "keep" in changes else {"held": noisy_loader()}
    return quick(model, **{"control": "auto", **held, **changes})


def solved(model):
    """What reconstruction won, but for the time that it took."""
    report = pruning.reconstruction_report(model)
    return None if report is None else dataclasses.replace(report, seconds=0.0)


def held_loss(model):
    return judge.held_loss(model, F.cross_entropy, judge.given(noisy_loader(), 0))


@pytest.mark.parametrize("prune", [QUICK, {"reconstruct": False, "permute": True}, {}])
def test_the_pruned_control_stands_where_it_is_better(prune, caplog):
    caplog.set_level(logging.INFO, logger="twofour.training")
    model, control, seen = trained(), trained(), []
    told = lambda m: seen.append(m) or accuracy(m)  # noqa: E731
    result = run(model, prune=prune, evaluate=told)
    by_hand = quick(trained(), control=control, held=noisy_loader(), prune=prune, evaluate=accuracy)
    with randomness.undisturbed():
        randomness.seed_everything(randomness.derive(0, 0, "pruning"))
        given = {"permute": True, **prune}
        pruning.prune(control, "2:4", data=warm_start.Calibration(noisy_loader(), 0), progress=False, **given)
    last = result.sparse.instead
    assert (
        last is not None and last.held == held_loss(model) == held_loss(control) and last.held < by_hand.sparse.judged
    )
    assert same_state(model, control) and masks.state_dict(model).keys() == masks.state_dict(control).keys() != set()
    assert all(torch.equal(mask.keep, masks.of(control)[name].keep) for name, mask in masks.of(model).items())
    assert result.sparse.history == by_hand.sparse.history and result.sparse.kept == by_hand.sparse.kept
    right = accuracy(model.eval())
    assert result.sparse.evaluation == last.evaluation == right and len(seen) == 7
    assert result.difference == right - by_hand.control.evaluation
    assert pruning.outcomes(model) == pruning.outcomes(control)
    assert pruning.permutation_report(model) == pruning.permutation_report(control)
    assert solved(model) == solved(control) and (solved(model) is None) == ("reconstruct" in prune)
    words = (
        f"the control, pruned after its training, stands: loss on what judges {by_hand.sparse.judged:.4g} after epoch "
        f"{by_hand.sparse.kept} of the sparse run, {last.held:.4g} of the pruned control"
    )
    assert result.notes[-1].startswith(words) and words in caplog.text
    assert "pruned 1 weights" not in result.notes[-1], "as the model was, which is told there"
    epoch = f"the state after epoch {by_hand.sparse.kept} of 2"
    assert f"{last.evaluation:.4g} of the pruned control; the pruned control stands instead of {epoch}" in result.won
    rows = [line.split() for line in str(result).splitlines()]
    assert rows[1][:3] == ["sparse", f"{result.sparse.before:.4g}", f"{by_hand.sparse.evaluation:.4g}"]
    assert rows[2][0] == "control" and rows[3] == ["pruned", "control", "-", f"{last.evaluation:.4g}", "-", "-"]
    assert rows[4][:4] == ["pruned", "control", "minus", "control:"] and f"{last.held:.4g} of the pruned" in str(result)
    assert json.loads(json.dumps(result.to_dict()))["sparse"]["instead"]["held"] == last.held


def test_the_sparse_run_stands_where_it_is_better(caplog):
    caplog.set_level(logging.INFO, logger="twofour.training")
    model, alone = trained(), trained()
    result = run(model, **HARD)
    wanted = quick(alone, control=trained(), held=noisy_loader(), **HARD)
    assert same_state(model, alone) and result.sparse.instead is None
    assert result.sparse.judged == wanted.sparse.judged == held_loss(model)
    words = f"the best state of the sparse run stands: loss on what judges {result.sparse.judged:.4g} after epoch"
    assert result.notes[-1].startswith(words) and words in caplog.text
    assert {mask.pattern.name for mask in masks.of(model).values()} == {"1:16"}


def test_it_is_told_before_what_it_costs(caplog):
    caplog.set_level(logging.INFO, logger="twofour.training")
    run(trained(), epochs=1)
    cost = "then teaches and is pruned last: the better one stands; control=None saves that"
    assert caplog.text.index(cost) < caplog.text.index("pruned 1 weights") < caplog.text.index("the trained control is")
    caplog.clear()
    run(trained(), epochs=1, keep="last")
    assert "and then teaches; control=None saves that" in caplog.text and "pruned last" not in caplog.text


@pytest.mark.parametrize("changes", [{"keep": "last"}, {"control": None}, {"teacher": "dense"}, {"teacher": None}])
def test_nothing_is_pruned_last_without_a_judge_or_a_control_of_its_own(changes):
    result = run(trained(), epochs=1, **changes)
    assert result.sparse.instead is None and not any("pruned control" in note for note in result.notes)
    given = run(trained(), epochs=1, control=trained())
    assert given.sparse.instead is None and not any("pruned control" in note for note in given.notes)


def test_that_no_epoch_helped_is_said_once_when_all_is_judged(caplog):
    """The sparse run and its control won nothing; of the run that the pruned control stands for, nothing is said."""
    caplog.set_level(logging.INFO, logger="twofour.training")
    hot = {"optimizer": lambda params: torch.optim.SGD(params, lr=30.0), "clip_norm": 1.0, "evaluate": accuracy}
    result = run(trained(), **hot)
    lines = [record.getMessage() for record in caplog.records]
    found = [place for place, line in enumerate(lines) if "no epoch made" in line]
    assert len(found) == 1 and found[0] > max(place for place, line in enumerate(lines) if "stands: loss" in line)
    stuck = "its control" if result.sparse.instead else "the model or its control"
    assert f"no epoch made {stuck} better" in lines[found[0]] and result.control.kept == result.sparse.kept == 0
    answers = iter([0.5, 0.5, 0.9, 0.6, 0.5, 0.1, 0.8])
    caplog.clear()
    result = run(trained(), keep="highest", evaluate=lambda m: next(answers))
    assert result.sparse.kept == 0 and result.sparse.instead is not None and "no epoch made" not in caplog.text


@pytest.mark.parametrize("keep, last, stands", [("highest", 0.9, True), ("highest", 0.8, False), ("lowest", 0.1, True)])
def test_evaluate_judges_it_where_that_keeps_the_best(keep, last, stands):
    answers = iter([0.5, 0.5, 0.5, 0.5, 0.8, 0.6, last])
    model = trained()
    result = run(model, keep=keep, evaluate=lambda m: next(answers))
    assert (result.sparse.instead is not None) == stands and result.sparse.evaluation == (last if stands else 0.8)
    best = 0.8 if keep == "highest" else 0.5
    when = "after epoch 1" if keep == "highest" else "before the first step"
    assert f"stands: evaluation {best:.4g} {when} of the sparse run, {last:.4g} of the pruned" in result.notes[-1]


@pytest.mark.parametrize("where", ["while it prunes", "while it is judged"])
@pytest.mark.parametrize("changes", [{}, HARD])
def test_stopped_in_the_last_pruning_it_goes_on_to_the_same_bits(where, changes, tmp_path, monkeypatch):
    real, pruned, evaluated = pruning.prune, [], []

    @functools.wraps(real)
    def stopping(model, *given, **options):
        pruned.append(model)
        if len(pruned) == 2 and where == "while it prunes":
            real(model, *given, **options)
            torch.rand(3)
            raise KeyboardInterrupt
        return real(model, *given, **options)

    def evaluate(model):
        evaluated.append(model)
        if len(pruned) == 2 and where == "while it is judged":
            raise KeyboardInterrupt
        return accuracy(model)

    model, before = trained(), torch.get_rng_state()
    with monkeypatch.context() as patched:
        patched.setattr(pruning, "prune", stopping)
        with pytest.raises(KeyboardInterrupt) as caught:
            run(model, checkpoint=tmp_path, evaluate=evaluate, **changes)
    alone, resumed, whole = trained(), trained(), trained()
    wanted = quick(alone, control=trained(), held=noisy_loader(), evaluate=accuracy, **changes)
    assert same_state(model, alone) and torch.equal(torch.get_rng_state(), before) and pruned[0] is model
    told = f"the sparse model has its state after epoch {wanted.sparse.kept} of {changes.get('epochs', 2)}, the best of"
    assert any(told in note for note in caught.value.__notes__)
    again = run(resumed, checkpoint=tmp_path, evaluate=accuracy, **changes)
    once = run(whole, evaluate=accuracy, **changes)
    assert same_state(resumed, whole) and again.sparse.instead == once.sparse.instead and again.notes == once.notes
    assert (once.sparse.instead is None) == bool(changes) and masks.state_dict(resumed).keys() == {"0.weight"}


def test_a_control_that_cannot_be_pruned_takes_no_part(monkeypatch, caplog):
    real, pruned = pruning.prune, []

    @functools.wraps(real)
    def failing(model, *given, **options):
        pruned.append(model)
        if model is not pruned[0]:
            raise PatternError("a weight holds NaN", got="nan", wanted="numbers", remedy="train it")
        return real(model, *given, **options)

    monkeypatch.setattr(pruning, "prune", failing)
    model, alone = trained(), trained()
    result = run(model)
    monkeypatch.undo()
    quick(alone, control=trained(), held=noisy_loader())
    assert same_state(model, alone) and result.sparse.instead is None
    assert "the control, pruned after its training, takes no part: " in result.notes[-1] == caplog.messages[-1]
    assert "a weight holds NaN" in result.notes[-1]


class Tied(nn.Module):
    """Channels that may be ordered, two places of one weight, and buffers in and out of the state dict."""

    def __init__(self, seed):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.norm = nn.Linear(WIDTH, 32), nn.BatchNorm1d(32)
            self.inner, self.again = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.again.weight = self.inner.weight
            self.last = nn.Linear(32, CLASSES)
            self.register_buffer("shift", torch.rand(WIDTH), persistent=False)

    def forward(self, x):
        h = torch.relu(self.norm(self.first(x + self.shift)))
        return self.last(torch.relu(self.again(torch.relu(self.inner(h)))))


def test_the_control_in_another_order_of_its_channels_stands_whole():
    model, alone = Tied(2), Tied(2)
    given = {"prune": {"reconstruct": False, "eligibility": "any"}}
    result = run(model, **given)
    wanted = quick(alone, control=Tied(2), held=noisy_loader(), **given)
    assert result.sparse.instead is not None and not same_state(model, alone)
    reports = pruning.permutation_report(model), pruning.permutation_report(alone)
    assert reports[0].kept and reports[0] != reports[1] and wanted.sparse.history == result.sparse.history
    assert held_loss(model) == result.sparse.instead.held < wanted.sparse.judged
    assert model.again.weight is model.inner.weight and len(masks.of(model)) == 3
    assert "channels permuted" in "".join(result.notes)


def two_pruned():
    """A pruned model, and another pruned in its own order of the channels, to another pattern of its first layer."""
    model, other = Tied(0).eval(), Tied(1).eval()
    pruning.prune(model, {"inner": "2:4", "last": "2:4", "*": "dense"}, criterion="magnitude", eligibility="any")
    example = Noisy().x[:4]
    given = {"criterion": "magnitude", "eligibility": "any", "permute": True, "example": example, "progress": False}
    pruning.prune(other, {"first": "1:4", "inner": "2:4", "*": "dense"}, **given)
    assert pruning.permutation_report(other).kept
    return model, other


def test_a_model_that_is_given_all_of_another_is_that_other():
    (model, other), x = two_pruned(), Noisy().x
    wanted, places = other(x), {name: value.data_ptr() for name, value in model.named_parameters()}
    pruned_last._give(other, model)
    assert torch.equal(model(x), wanted) and torch.equal(model.shift, other.shift) and model.shift is not other.shift
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == places, "in place"
    assert model.again.weight is model.inner.weight
    found = {name: (mask.pattern.name, mask.keep) for name, mask in masks.of(model).items()}
    assert {name: pattern for name, (pattern, _) in found.items()} == {"first.weight": "1:4", "inner.weight": "2:4"}
    assert all(torch.equal(keep, masks.of(other)[name].keep) for name, (_, keep) in found.items())
    assert pruning.permutation_report(model) is pruning.permutation_report(other) is not None
    with torch.no_grad():
        other.first.weight.zero_()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(model(x), wanted), "nothing is shared"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    assert not model.first.weight[~found["first.weight"][1]].any() and not torch.equal(model(x), wanted)


@pytest.mark.parametrize("at", ["attach_all", "detach", "hand_on"])
def test_an_end_while_it_is_given_puts_the_model_back(at, monkeypatch):
    (model, other), x = two_pruned(), Noisy().x
    wanted, kept, where = model(x), masks.of(model), pruning if at == "hand_on" else masks
    kept = {name: mask.keep.clone() for name, mask in kept.items()}
    shift, outcomes, real, calls = model.shift.clone(), pruning.outcomes(model), getattr(where, at), []

    def stopping(*given):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(where, at, stopping)
    with pytest.raises(KeyboardInterrupt):
        pruned_last._give(other, model)
    assert torch.equal(model(x), wanted) and torch.equal(model.shift, shift) and pruning.outcomes(model) is outcomes
    assert {name: mask.keep.tolist() for name, mask in masks.of(model).items()} == {
        n: k.tolist() for n, k in kept.items()
    }


class Counted(nn.Module):
    """Counts its steps in a buffer that is no part of its state dict, and answers by it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.steps += int(self.training)
        return x * (1 + 0.01 * self.steps)


def test_buffers_of_the_control_come_along_of_a_run_that_goes_on_too(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    whole, resumed = trained().append(Counted()), trained().append(Counted())
    with monkeypatch.context() as patched:
        patched.setattr(pruned_last, "compared", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(trained().append(Counted()), checkpoint=tmp_path)
    results = [run(whole), run(resumed, checkpoint=tmp_path)]
    assert results[0].sparse.instead == results[1].sparse.instead is not None and results[0].control.kept == 2
    for model in (whole, resumed):
        assert model[-1].steps == 12 and held_loss(model.eval()) == results[0].sparse.instead.held
    assert same_state(whole, resumed)
