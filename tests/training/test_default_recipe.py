"""`finetune` given a dense model and little else: pruned, trained, and what is refused or told."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.training.default import QUICK, data_of_prune, quick, trained
from tests.training.small import Noisy, accuracy, noisy_loader, pair_of_models, recipe
from tests.turns import in_turn
from twofour import masks
from twofour.errors import LayerError, TrainingError
from twofour.training import defaults, finetune
from twofour.training.batches import epoch_batches
from twofour.training.result import Epoch, Result, Run


def test_a_dense_model_and_a_loader_are_enough(caplog):
    caplog.set_level(logging.INFO, logger="twofour.training")
    model = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    result = finetune(model, noisy_loader(batch=4), evaluate=accuracy, teacher="dense", progress=False)
    assert {name: mask.pattern.name for name, mask in masks.of(model).items()} == {"0.weight": "2:4"}
    assert not model.training and result.teacher == "the dense model"
    assert len(result.sparse.history) == 10  # 48 samples, so 12 steps an epoch: 500 steps are out of reach
    best = min([(result.sparse.held, 0), *((epoch.held, epoch.epoch) for epoch in result.sparse.history)])
    assert result.sparse.kept == best[1]
    told = "\n".join(result.notes)
    for words in ("cross entropy", "AdamW", "10 epochs of 12 steps", "48 samples of the training", "by admm", "MiB"):
        assert words in told
    assert told.index("MiB") < told.index("pruned 1 weights") and all(note in caplog.text for note in result.notes)
    assert "teaches in batches that it answers clearly better" in caplog.text and "steps at" in caplog.text
    assert str(result).endswith(result.notes[-1]) and result.to_dict()["notes"] == list(result.notes)
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    shares = [epoch.taught for epoch in result.sparse.history]
    assert all(share in [n / 12 for n in range(13)] for share in shares)
    assert f"loss in {sum(shares) / 10:.1%} of its batches, clearly better there" in str(result)


def test_what_is_pruned_by_the_weights_alone_is_not_said_to_be_calibrated():
    for criterion, words in (
        ("magnitude", "what it loses measured"),
        ("wanda", "calibrated"),
    ):
        told = quick(trained(), prune={**QUICK, "criterion": criterion}, epochs=1).notes[-1]
        assert f"by {criterion}; {words} on 6 batches of the loader, the first ones" in told


@pytest.mark.parametrize("rows, behind", [(400, 16), (256, 16), (248, 0)])
def test_what_judges_does_not_calibrate_where_there_is_enough_beside_it(rows, behind, monkeypatch):
    seen = data_of_prune(monkeypatch)
    loader = DataLoader(Noisy(rows), 8, shuffle=True)
    result = quick(trained(), loader, control="auto", epochs=1)
    whole = list(epoch_batches(loader, 0, 0))
    for taken in seen:
        wanted = whole[behind:][: len(taken)]
        assert all(torch.equal(batch.inputs, x) for batch, (x, _) in zip(taken, wanted, strict=True)) and taken
    assert len(seen) == 2, "the model first, its trained control last"
    words = f"batches of the loader, {f'behind the first {behind}, which judge' if behind else 'the first ones'}"
    assert sum(words in note for note in result.notes) >= 1
    apart = quick(trained(), loader, held=[whole[0]], epochs=1)
    assert any("batches of the loader, the first ones" in note for note in apart.notes), "held= judges, not the loader"


def test_a_training_that_makes_it_worse_gives_back_where_it_began(caplog):
    model = trained()
    found = []
    result = quick(
        model,
        optimizer=lambda params: torch.optim.SGD(params, lr=30.0),
        clip_norm=1.0,
        evaluate=lambda m: found.append(copy.deepcopy(m.state_dict())) or accuracy(m),
    )
    assert result.sparse.kept == 0 and result.sparse.evaluation == result.sparse.before
    assert result.sparse.held < min(epoch.held for epoch in result.sparse.history)
    assert all(torch.equal(value, found[0][name]) for name, value in model.state_dict().items())
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == [
        "no epoch made the model better than before the training, by what judges: that state stands. Another learning "
        "rate or more epochs may do more"
    ]
    assert "the state before the training stands" in str(result)


def test_without_a_length_the_rate_is_said_to_be_constant():
    x = Noisy()

    class Unmeasured:
        def __iter__(self):
            yield x.x[:24], x.y[:24]
            yield x.x[24:], x.y[24:]

    result = quick(trained(), Unmeasured(), optimizer="auto", epochs=2)
    assert "AdamW at a constant rate" in "".join(result.notes) and "cycle" not in "".join(result.notes)
    assert len({epoch.lr for epoch in result.sparse.history}) == 1


def test_float16_needs_an_optimiser_of_its_own():
    model = trained().half()
    data = [(Noisy().x.half(), Noisy().y)]
    with pytest.raises(TrainingError, match=r"cannot train weights in float16[\s\S]*0.weight[\s\S]*model.bfloat16"):
        quick(model, data, optimizer="auto")
    assert not masks.of(model)
    assert defaults.optimizer_for(model.bfloat16()).rate > 0


def test_what_is_not_trained_is_told():
    model = trained()
    model[0].weight.requires_grad_(False)
    told = "".join(quick(model).notes)
    assert "1 of them frozen, so not trained again: 0.weight" in told


def test_the_loss_that_is_shown_is_that_of_the_state_that_stands():
    history = tuple(Epoch(number, loss, 0.1, 0.5) for number, loss in ((1, 0.25), (2, 0.75)))
    shown = [str(Result(Run("sparse", 0.5, history, 1.0, None, kept), None, 0)).split("\n")[1] for kept in (None, 1, 0)]
    assert [line.split()[3] for line in shown] == ["0.7500", "0.2500", "-"]


def test_what_a_training_won_is_one_sentence():
    plain = (Epoch(1, 0.5, 0.1, None), Epoch(2, 0.25, 0.1, None))
    judged = tuple(Epoch(epoch.epoch, epoch.loss, 0.1, {"right": epoch.loss}, held=epoch.loss) for epoch in plain)
    runs = [
        Run("sparse", None, plain, 1.0),
        Run("sparse", {"right": 0.1}, judged, 1.0, 0.75, 1),
        Run("sparse", 0.5, plain, 1.0, 0.75, 0),
    ]
    assert [run.won for run in runs] == [
        "sparse: loss 0.5 in the first epoch, 0.25 in the last; the state after epoch 2 of 2 stands",
        "sparse: loss on what judges 0.75 before, 0.5 after, evaluation right 0.1 before, right 0.5 after; the state "
        "after epoch 1 of 2 stands",
        "sparse: loss on what judges 0.75 before, 0.75 after, evaluation 0.5 before, 0.5 after; the state before the "
        "training stands",
    ]
    assert plain[0].told == "loss 0.5000" and judged[0].told == "loss 0.5000, 0.5 on what judges, evaluation right 0.5"
    assert "evaluate=, a function of the model, tells" in Result(runs[0], None, 0).won
    assert Result(runs[2], runs[2], 0).won.endswith("; sparse minus control +0")


def test_the_callers_optimiser_and_schedule_are_obeyed():
    rates = []

    class Told(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    quick(trained(), optimizer=lambda params: Told(params, lr=0.25))
    assert set(rates) == {0.25}
    rates.clear()
    quick(
        trained(),
        optimizer=lambda params: Told(params, lr=0.25),
        schedule=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5),
        schedule_every="epoch",
    )
    half = len(rates) // 2
    assert rates == [0.25] * half + [0.125] * half
    rates.clear()
    model = trained()
    schedule = defaults.cycle(20)(Told(model.parameters(), lr=1.0))
    for _ in range(20):
        schedule.optimizer.step()
        schedule.step()
    assert rates[:2] == [0.5, 1.0] and rates[2] == 1.0 and rates == sorted(rates[:2]) + sorted(rates[2:])[::-1]
    assert 0 < rates[-1] < 0.01 and schedule.get_last_lr()[0] < 1e-9


def test_the_rate_is_that_of_the_weights():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for number, layer in enumerate(model, 1):
        nn.init.constant_(layer.weight, number / 10)
    model[1].weight.data[:, ::2] = 0  # pruned values do not count
    build = defaults.optimizer_for(model)
    assert build.rate == pytest.approx(2e-4) == build(list(model.parameters())).param_groups[0]["lr"]
    with pytest.raises(TrainingError, match="no learning rate"):
        defaults.rate_for(nn.LayerNorm(4))
    batches = [0] * 40
    assert [defaults.epochs_for(batches[:n]) for n in (1, 40)] == [10, 10]
    assert defaults.epochs_for(range(100)) == 5 and defaults.epochs_for(range(9999)) == 3
    assert defaults.epochs_for(iter(())) == 3


def test_one_batch_a_model_in_evaluation_mode_and_a_loader_without_a_length(caplog):
    x = Noisy()

    class Endless:
        def __iter__(self):
            yield x.x, x.y

    for loader in ([(x.x, x.y)], Endless()):
        model = trained().eval()
        result = quick(model, loader)
        assert not model.training and masks.of(model)
        assert "which all states have seen, few to tell states apart: held= takes more" in "".join(result.notes)


@in_turn(
    "changes, words",
    [
        ({"loader": iter([(torch.zeros(2, 16), torch.zeros(2).long())])}, "walked only once"),
        ({"loss": lambda out, y: F.cross_entropy(out, y, reduction="none")}, ".mean()"),
        ({"optimizer": lambda params: None}, "which has no `param_groups`"),
        ({"keep": "best"}, "one of last, loss, highest, lowest"),
        ({"keep": "highest"}, "no `evaluate`"),
        ({"keep": "last", "held": [(torch.zeros(2, 16), torch.zeros(2).long())]}, "nothing is judged by `held`"),
        ({"held": []}, "nothing in `held`"),
        ({"prune": {"simplify": True}}, "'simplify'"),
        ({"prune": {"data": iter([torch.zeros(2, 16)])}}, "data of `prune` can be walked only once"),
        ({"prune": ["head"]}, "a mapping of arguments of twofour.prune"),
        ({"teacher": "me"}, '"dense", "control", a torch.nn.Module'),
        ({"scheme": "2:4", "pattern": "2:4"}, "a scheme, which prunes meanwhile"),
        ({"scheme": "2:4", "prune": None, "keep": "loss"}, "becomes sparse meanwhile"),
    ],
)
def test_what_is_refused_leaves_the_dense_model_as_it_was(changes, words):
    model = trained()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TrainingError) as caught:
        quick(model, **changes)
    assert words in str(caught.value)
    assert not masks.of(model) and all(torch.equal(before[name], p) for name, p in model.state_dict().items())


def test_a_model_that_is_wholly_frozen_is_refused_before_it_is_pruned():
    model = trained().requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TrainingError, match="all frozen"):
        quick(model)
    assert not masks.of(model) and all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_wrappers_for_several_devices_are_refused_by_name():
    model = trained()
    with pytest.raises(TrainingError, match=r"model, a DataParallel[\s\S]*finetune\(model.module"):
        quick(nn.DataParallel(model))
    with pytest.raises(TrainingError, match=r"model.0, a DataParallel"):
        quick(nn.Sequential(nn.DataParallel(model)))
    assert not masks.of(model)
    with pytest.raises(LayerError, match="nothing in the model can be pruned"):
        finetune(nn.Linear(16, 4), noisy_loader(), progress=False)


def test_a_pruned_model_takes_no_pattern_and_keeps_the_papers_workflow():
    model, _ = pair_of_models()
    for given in ({"pattern": "2:4"}, {"prune": {}}):
        with pytest.raises(TrainingError, match=r"not pruned here[\s\S]*a model with masks"):
            finetune(model, noisy_loader(), **recipe(), **given)
    result = finetune(model, noisy_loader(), **recipe())
    assert (result.teacher, result.sparse.kept, result.sparse.held) == (None, None, None)
    assert result.notes[0] == "2 epochs of 6 steps" and result.notes[1].startswith("memory in MiB: gradients 0.0, and")
    model, control = pair_of_models()
    assert (
        finetune(model, noisy_loader(), **recipe(), control=control)
        .notes[0]
        .endswith(", of the control as many before")
    )


def test_the_folder_of_a_run_that_began_pruned_is_refused_before_pruning(tmp_path):
    (model, control), (again, other) = pair_of_models(), pair_of_models()
    finetune(model, noisy_loader(), **recipe(), control=control, checkpoint=tmp_path)
    for name in ("sparse.pt", "control.pt"):
        dense = trained()
        before = copy.deepcopy(dense.state_dict())
        with pytest.raises(TrainingError, match=rf"did not begin with this dense model[\s\S]*{name} without start.pt"):
            quick(dense, checkpoint=tmp_path)
        assert not masks.of(dense) and all(torch.equal(before[key], p) for key, p in dense.state_dict().items())
        assert not (tmp_path / "start.pt").exists()
        if name == "sparse.pt":
            finetune(again, noisy_loader(), **recipe(), control=other, checkpoint=tmp_path)  # the rightful run goes on
            (tmp_path / name).unlink()
