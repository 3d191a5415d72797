"""The learning rate that `finetune` finds where nobody gives an optimiser."""

import copy
import dataclasses
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twofour
from tests.training.default import stopping, trained
from tests.training.small import Noisy, accuracy, dense_model, noisy_loader, pair_of_models, same_state
from tests.turns import in_turn
from twofour import masks
from twofour.errors import TrainingError
from twofour.training import defaults, finetune, judge, rates, sr_ste
from twofour.training.result import Epoch, Run

LOADER = {"loss": F.cross_entropy, "progress": False}


def pruned() -> nn.Module:
    return twofour.prune(trained(), "1:4", criterion="magnitude", eligibility="any")


def test_a_pruned_model_and_a_loader_win_back_what_was_lost(caplog):
    caplog.set_level(logging.INFO, logger="twofour.training")
    model = pruned()
    result = finetune(model, noisy_loader(), evaluate=accuracy, progress=False)
    run = result.sparse
    assert run.evaluation > run.before and run.history[run.kept - 1].held < 0.8 * run.held
    told = "\n".join(result.notes)
    for words in (
        "AdamW at a rate that is looked for",
        "the learning rate is ",
        "samples that 25 steps did not see",
    ):
        assert words in told
    careful = defaults.rate_for(pruned())
    assert run.history[0].lr > 3 * careful, "a model that lost much is not trained carefully"
    lines = [record.getMessage() for record in caplog.records]
    assert "5 trials of 25 steps at most" in caplog.text and lines[-1] == result.won
    assert sum("sparse epoch" in line for line in lines) == 10 and "None" not in caplog.text
    assert "loss on what judges" in result.won and "evaluation" in result.won and run.stands in str(result)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_trials_leave_model_and_random_numbers_as_they_were():
    model, alike = pruned(), pruned()
    model.eval()
    settings = {"seed": 0, "scheme": None}
    given = dict.fromkeys(("optimizer", "schedule", "epochs"), "auto") | {"loss": F.cross_entropy}
    plan, _ = defaults.completed(model, noisy_loader(True), given, settings, "loss", None)
    state, own = torch.get_rng_state(), plan.loader.generator.get_state()
    found, (note,) = rates.found(model, plan, plan, None, progress=False)
    assert same_state(model, alike) and not model.training and model[0].weight.grad is None
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(plan.loader.generator.get_state(), own)
    assert (
        not found.optimizer.sought
        and found.optimizer.rate > plan.optimizer.rate
        and f"{found.optimizer.rate:g}" in note
    )
    assert rates.found(model, found, found, None, progress=False) == (found, [])


@in_turn(
    "losses, times, tried",
    [
        (([1.0], [0.5], [0.4], [0.45], [0.6]), 3, 4),
        (([1.0], [0.9], [0.8], [0.7], [0.6], [0.5]), 100, 5),
        (([1.0], [0.9], [0.9], [0.8], [0.801], [0.85]), 30, 5),
        (([1.0], [0.99], [0.985], [1.0], [0.99], [1.0]), None, 5),
        (([1.0], [1.1], [1.2], [1.3]), None, 3),
        (([1.0], [1.1], [1.09], [1.08], [0.9], [0.7]), 100, 5),
        (([1.0], [1.4], [1.3], [1.2], [1.1], [1.05]), None, 5),
        (([1.0], [float("nan")]), None, 1),
        (([-1.0], [-1.5], [-1.6], [-1.0]), 3, 3),
        (
            ([1.0, 2.0, 3.0], [0.8, 1.9, 2.9], [0.89, 1.89, 2.89], [0.0, 2.0, 3.5], [0.9, 1.9, 2.9], [1.0, 2.0, 2.9]),
            3,
            5,
        ),
        (
            ([1.0, 2.0, 3.0], [0.5, 2.4, 2.9], [1.4, 1.6, 2.9], [1.4, 1.7, 3.1], [1.4, 1.7, 3.2], [1.4, 1.7, 3.2]),
            None,
            5,
        ),
    ],
)
def test_the_rate_of_the_best_trial_is_taken_and_what_is_clearly_worse_ends_them(losses, times, tried):
    answers, trials = iter(losses), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "held_losses", lambda *_: next(answers))
        patch.setattr(rates, "_trained", lambda model, plan, *_: trials.append(plan.optimizer.rate) or True)
        model, _ = pair_of_models()
        given = {"loss": F.cross_entropy, "optimizer": "auto", "schedule": "auto", "epochs": 3}
        plan, _ = defaults.completed(model, noisy_loader(), given, {"seed": 0, "scheme": None}, "last", None)
        found, (note,) = rates.found(model, plan, plan, None, progress=False)
    assert len(trials) == tried and ("a careful one" in note) == (times is None)
    assert found.optimizer.rate == pytest.approx((times or 1) * plan.optimizer.rate, rel=0.06)


def test_rates_too_low_to_learn_do_not_end_the_search():
    """Batch norms that meet their data raise the loss of a model that was never trained, at the lowest rates too."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        x = torch.randn(640, 32)
        y = x[:, :8].argmax(1)
        torch.manual_seed(2)
        layers = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 8)
        model = twofour.prune(nn.Sequential(*layers), "2:4", criterion="magnitude")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 16, shuffle=True)
    careful = defaults.rate_for(model)
    run = finetune(model, loader, **LOADER, epochs=2).sparse
    assert max(epoch.lr for epoch in run.history) > 50 * careful and run.history[-1].held < 0.8 * run.held


@in_turn(
    "losses, words",
    [
        (([1.0], [1.4], [1.3], [1.2], [1.1], [1.05]), "The trials lost less at higher learning rates, least at 0.0"),
        (([1.0], [1.1], [1.2], [1.3]), "A lower learning rate or more epochs"),
        (([1.0], [0.9], [0.8], [0.7], [0.6], [0.5]), "A lower learning rate or more epochs"),
        (([1.0], [1.0], [1.0], [1.0], [1.0], [1.0]), "Another learning rate or more epochs"),
    ],
)
def test_what_may_do_more_follows_from_the_trials(losses, words):
    answers, (model, _) = iter(losses), pair_of_models()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "held_losses", lambda *_: next(answers))
        patch.setattr(rates, "_trained", lambda *_: True)
        given = {"loss": F.cross_entropy, "optimizer": "auto", "schedule": "auto", "epochs": 3}
        plan, _ = defaults.completed(model, noisy_loader(), given, {"seed": 0, "scheme": None}, "last", None)
        found, _ = rates.found(model, plan, plan, None, progress=False)
    assert found.optimizer.advice.startswith(words)


@in_turn(
    "tried, losses, words",
    [
        ((6, 0.8), [0.9, 0.5, 0.2], "is 0.2 at best in 24: by that trend epochs=8 may bring it to about 0.141"),
        ((6, 0.8), [0.9, 0.2, 0.5], "by that trend epochs=8 may bring it to about 0.141"),
        ((6, 0.202), [0.3, 0.25, 0.2], "is 0.2 at best in 24: by that trend epochs=8 would bring less than 5%"),
        ((6, 0.1), [0.3, 0.25, 0.2], "epochs=8 would bring less than 5%"),
        (None, [0.9, 0.5, 0.2], None),
        ((13, 0.8), [0.9, 0.5, 0.2], None),
    ],
)
def test_what_twice_as_long_may_bring_follows_from_two_whole_cycles(tried, losses, words):
    """Of four epochs of six steps the trial is a quarter; half of the power from 0.8 to 0.2, which is one, is left."""
    given = dict.fromkeys(("optimizer", "schedule"), "auto") | {"loss": F.cross_entropy, "epochs": 4}
    plan, _ = defaults.completed(dense_model(), noisy_loader(), given, {"seed": 0, "scheme": None}, "last", None)
    plan = dataclasses.replace(plan, optimizer=defaults.Adamw(0.1, tried=tried))
    epochs = [Epoch(number, 1.0, 0.1, None, held) for number, held in enumerate([1.0, *losses], 1)]
    told = rates.longer(Run("sparse", None, tuple(epochs), 1.0, 2.0, 4), plan)
    assert [words in line and "after a trial of 6 steps" in line for line in told] == ([] if words is None else [True])
    unjudged = [dataclasses.replace(epoch, held=None) for epoch in epochs]
    assert rates.longer(Run("sparse", None, tuple(unjudged), 1.0), plan) == []


def test_with_data_held_back_the_result_says_what_more_epochs_may_bring():
    data, held = Noisy(rows=96), Noisy(rows=64, seed=9)
    batches = list(zip(data.x.split(8), data.y.split(8), strict=True))
    result = finetune(pruned(), batches, **LOADER, held=[(held.x, held.y)], epochs=6)
    assert result.notes[-1].startswith("the loss on `held`, ") and "trial of 25 steps" in result.notes[-1]
    assert "on `held`, " not in "".join(finetune(pruned(), batches, **LOADER, epochs=6).notes)


def test_a_training_that_only_forgets_is_a_careful_one(caplog):
    """Labels that contradict what the model knows: each step costs something of it."""
    data = Noisy(rows=96)
    held, wrong = [(data.x[:48], data.y[:48])], list(zip(data.x[48:].split(8), (3 - data.y[48:]).split(8), strict=True))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    twofour.training.train(model, noisy_loader(), **LOADER, optimizer=lambda p: torch.optim.Adam(p, 1e-2), epochs=6)
    twofour.prune(model, {"0": "2:4"}, criterion="magnitude")
    before = copy.deepcopy(model)
    result = finetune(model, wrong, **LOADER, held=held, epochs=2)
    assert "the learning rate is a careful one" in "".join(result.notes) and result.sparse.kept == 0
    assert same_state(model, before)
    assert "that state stands. A lower learning rate or more epochs may do more" in caplog.text


def test_one_batch_cannot_judge_itself_but_data_held_back_can():
    x = Noisy()
    for held, words in (
        (None, "one batch cannot both train and judge, held= can"),
        ([(x.x, x.y)], "that 10 steps did not see"),
    ):
        told = finetune(pruned(), [(x.x, x.y)], **LOADER, held=held).notes
        assert words in told[-1]


def test_where_trials_would_show_little_the_rate_is_the_careful_one():
    model = dense_model()
    result = finetune(
        model, noisy_loader(), **LOADER, epochs=1, scheme=lambda m, _: sr_ste.attach(m, "2:4", eligibility="any")
    )
    assert result.sparse.kept is None and "AdamW at a rate of" in result.notes[0]
    assert "a careful one: none is looked for where a scheme changes the model meanwhile" in result.notes[0]
    low = twofour.quantize(trained(), "w4", "a8", ends=None)
    assert defaults.unsearched(low, None) == "none is looked for under what is attached to the model"
    result = finetune(pruned(), noisy_loader(), **LOADER, optimizer=lambda p: torch.optim.SGD(p, 0.1), epochs=1)
    assert result.sparse.kept is None and "learning rate" not in "".join(result.notes)


def test_a_trial_that_is_stopped_leaves_the_model_as_it_was_and_says_so():
    words = "The trials of the learning rate ended early; the model has the state that they began with."
    for step in (2, 30):  # in the first trial and in the second
        model = pruned()
        with pytest.raises(KeyboardInterrupt) as caught:
            finetune(model, noisy_loader(), **{**LOADER, "loss": stopping(step)})
        assert same_state(model, pruned()) and masks.of(model)
        assert caught.value.__notes__ == [words], "a model that came pruned is as it came"
    model, own = trained(), {"reconstruct": False, "permute": False, "criterion": "magnitude"}
    with pytest.raises(KeyboardInterrupt) as caught:
        finetune(model, noisy_loader(), **{**LOADER, "loss": stopping(30)}, prune=own)
    assert masks.of(model) and caught.value.__notes__[0] == words
    assert "pruned and not trained yet; hand the dense model over again" in caught.value.__notes__[1]


def test_a_run_that_began_by_another_default_is_told_what_to_pass(tmp_path):
    """The last state stood once where nobody gives an optimiser."""
    given = {"epochs": 2, "checkpoint": tmp_path}
    finetune(pruned(), noisy_loader(), **LOADER, **given, keep="last")
    with pytest.raises(TrainingError, match=r"keep: last\n[\s\S]*keep: loss\n[\s\S]*pass keep=\"last\" to go on"):
        finetune(pruned(), noisy_loader(), **LOADER, **given)
    finetune(pruned(), noisy_loader(), **LOADER, **given, keep="last")


@in_turn(
    "optimizer, words",
    [
        (lambda p: torch.optim.SGD(p, 0.1), "optimiser: SGD"),
        (lambda p: torch.optim.AdamW(p, torch.tensor(0.1)), "settings of the optimiser"),
    ],
)
def test_a_run_of_another_optimiser_is_refused_before_any_trial(tmp_path, optimizer, words):
    given, trials = {"epochs": 2, "checkpoint": tmp_path / words, "keep": "loss"}, []
    finetune(pruned(), noisy_loader(), **LOADER, **given, optimizer=optimizer)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingError, match=words):
        patch.setattr(rates, "_trials", lambda *_: trials.append(_) or [])
        finetune(pruned(), noisy_loader(), **LOADER, **given)
    assert not trials


@pytest.mark.parametrize("dense", [False, True])
def test_a_run_goes_on_at_the_rate_that_it_found(tmp_path, dense):
    def run(folder, loss=F.cross_entropy):
        model = trained() if dense else pruned()
        own = {"prune": {"reconstruct": False, "permute": False}} if dense else {}
        result = finetune(model, noisy_loader(), **{**LOADER, "loss": loss}, **own, epochs=3, checkpoint=folder)
        return model, result

    steps = []

    def counted(output, target):
        steps.append(output.requires_grad)
        return F.cross_entropy(output, target)

    model, whole = run(None, counted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stopping(sum(steps) - 8))
    steps.clear()
    again, result = run(tmp_path, counted)
    assert sum(steps) == 12, "two epochs of six steps, and no trials"
    assert same_state(again, model) and result.sparse.history == whole.sparse.history
    assert "that of the interrupted run" in result.notes[-1]
    assert result.sparse.kept == whole.sparse.kept
