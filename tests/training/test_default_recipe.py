"""`finetune` given a dense model and little else: pruned, taught, judged, rewound, and the same after a kill."""

import copy
import functools
import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import twofour
from tests.training.small import Noisy, accuracy, dense_model, noisy_loader, pair_of_models, recipe, same_state
from tests.turns import in_turn
from twofour import masks
from twofour.errors import FormatError, LayerError, TrainingError
from twofour.training import Taught, checkpoint, controls, defaults, distilled, finetune, judge, train, trainee
from twofour.training.batches import epoch_batches
from twofour.training.lesson import Lesson
from twofour.training.plan import Plan
from twofour.training.result import Epoch, Result, Run

QUICK = {"reconstruct": False, "permute": False}
"""What keeps a test of something else short."""


@functools.cache
def converged(seed: int) -> nn.Module:
    model = dense_model(seed, dropout=0.0)
    train(model, noisy_loader(), **recipe(epochs=6))
    return model


def trained(seed: int = 0) -> nn.Module:
    return copy.deepcopy(converged(seed))


def optimizer(params):
    return torch.optim.SGD(params, lr=0.05)


def quick(model, loader=None, **changes):
    given = {"loss": F.cross_entropy, "optimizer": optimizer, "epochs": 2, "progress": False, "prune": QUICK}
    given["control"] = None
    return finetune(model, noisy_loader() if loader is None else loader, **{**given, **changes})


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
        ("magnitude", "what it loses measured on the first"),
        ("wanda", "calibrated on the first"),
    ):
        told = quick(trained(), prune={**QUICK, "criterion": criterion}, epochs=1).notes[-1]
        assert f"by {criterion}; {words} 6 batches of the loader" in told


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
    assert "no epoch made the model better" in caplog.text
    assert "the best state is that before the training" in str(result)


@pytest.mark.parametrize("keep, wanted", [("highest", 2), ("lowest", 1), ("last", None)])
def test_the_best_state_is_that_which_evaluate_answers_best(keep, wanted):
    model, _ = pair_of_models()
    answers, states = iter([0.5, 0.1, 0.9, 0.4]), []

    def evaluate(m):
        states.append(copy.deepcopy(m.state_dict()))
        return {"first": next(answers), "second": 0.0}

    result = finetune(model, noisy_loader(), **recipe(epochs=3), evaluate=evaluate, keep=keep)
    assert result.sparse.kept == wanted
    kept = states[-1 if wanted is None else wanted]
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_the_control_keeps_its_best_state_too_and_sees_the_same_data():
    model = trained()
    control = copy.deepcopy(model)
    result = quick(model, control=control, evaluate=accuracy)
    assert result.control.kept is not None and result.control.held is not None
    assert result.difference == result.sparse.evaluation - result.control.evaluation
    assert not masks.of(control)


def test_a_control_teaches_a_model_that_was_given_dense():
    dense, alone = trained(), trained()
    result = quick(dense, control=trained())
    asked = quick(alone, control=trained(), teacher="control")
    assert result.teacher == asked.teacher == "the control" and same_state(dense, alone)
    assert "taught by the control: half of the sparse run's loss, not to be compared with others" in str(result)
    assert any("forward pass of the control, which is trained first as long" in note for note in result.notes)
    untaught = trained()
    assert quick(untaught, control=trained(), teacher=None).teacher is None and not same_state(untaught, dense)
    other = quick(trained(), control=trained(), teacher=trained(1))
    assert other.teacher == "another model" and any("forward pass of another model" in note for note in other.notes)


def test_a_control_that_is_no_copy_is_told_of(caplog):
    quick(trained(), control=trained(), epochs=1)
    assert "no copy" not in caplog.text
    quick(trained(), control=trained(1), epochs=1)
    assert "the control is no copy of the dense model: 6 weights differ, such as `0.weight`" in caplog.text


def test_a_control_that_is_not_there_cannot_teach():
    model, (pruned, _) = trained(), pair_of_models()
    with pytest.raises(TrainingError, match=r"no control that could teach[\s\S]*copy.deepcopy"):
        quick(model, teacher="control")
    assert not masks.of(model)
    with pytest.raises(TrainingError, match="no control that could teach"):
        finetune(pruned, noisy_loader(), **recipe(), teacher="control")


def test_by_itself_a_copy_of_the_dense_model_proves_and_teaches(caplog):
    caplog.set_level(logging.INFO, logger="twofour.training")
    model, by_hand, control = trained(), trained(), trained()
    control[4].bias.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    by_hand[4].bias.requires_grad_(False)
    result = quick(model, control="auto", evaluate=accuracy, held=noisy_loader())
    wanted = quick(by_hand, control=control, evaluate=accuracy, held=noisy_loader())
    assert same_state(model, by_hand) and result.teacher == "the control"
    assert result.control.history == wanted.control.history and result.difference == wanted.difference is not None
    cost = next(note for note in result.notes if "forward pass of the control, which is trained first" in note)
    assert cost.endswith("control=None saves both") and "the control 0.0" in "".join(result.notes)
    first = caplog.text.index
    assert first(cost) < first("pruned 1 weights") < first("control epoch 1 of 2") < first("sparse epoch 1 of 2")
    assert quick(trained(), control="auto", teacher=None).control is None, "it is made to teach"
    asked = quick(trained(), control="auto", optimizer="auto", teacher="control", epochs=1)
    assert asked.teacher == "the control" and asked.control is not None


class Uncopied(nn.Sequential):
    def __deepcopy__(self, memory):
        raise RuntimeError("a handle of a device")


class Sharing(nn.Sequential):
    def __deepcopy__(self, memory):
        return Sharing(*self)


def caught_in_a_function(model):
    forward = model[1].forward
    model[1].forward = lambda x: forward(x)
    return model


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda m: Uncopied(*m), "cannot be copied (RuntimeError: a handle of a device)"),
        (lambda m: Sharing(*m), "the copy would share 0.weight, 0.bias, 1.weight"),
        (caught_in_a_function, "the copy would share 1.weight, 1.bias"),
    ],
)
def test_without_a_copy_there_is_no_control_and_a_warning(change, told, caplog):
    result = quick(change(trained()), control="auto")
    assert result.control is result.teacher is None and result.sparse.kept is not None
    note = next(note for note in result.notes if note.startswith("no control, which would also teach: "))
    assert told in note and [(r.levelname, r.message) for r in caplog.records if "no control" in r.message] == [
        ("WARNING", note)
    ]
    for teacher, words in (("control", "no control that could teach"), ("dense", "cannot be copied")):
        model = change(trained())
        with pytest.raises(TrainingError, match=words):
            quick(model, control="auto", teacher=teacher)
        assert not masks.of(model)


def test_an_optimiser_of_other_weights_has_no_control():
    model, extra = trained(), nn.Parameter(torch.zeros(3))
    captured = lambda params: optimizer(list(model.parameters()))  # noqa: E731
    told = "".join(quick(model, control="auto", optimizer=captured).notes)
    assert "takes other parameters than those that it is given" in told
    more = quick(trained(), control="auto", optimizer=lambda params: optimizer([*params, extra]))
    assert (
        more.control is None and quick(trained(), control=trained(), optimizer=lambda p: optimizer([*p, extra])).control
    )
    model = trained()
    with pytest.raises(TrainingError, match=r"cannot be compared[\s\S]*an optimiser of the model's weights"):
        quick(model, control=trained(), optimizer=captured_of(model))
    assert not masks.of(model)


def captured_of(model):
    return lambda params: optimizer(list(model.parameters()))


def test_no_control_is_made_where_none_could_teach(caplog):
    bare = quick(trained(), control="auto", optimizer="auto", epochs=1)
    assert bare.control is None and "training is not known; its optimizer=" in "".join(bare.notes)
    assert "no control" not in caplog.text, "nothing is wrong"

    class Words(nn.Sequential):
        def forward(self, x):
            return SimpleNamespace(words="none", scores=super().forward(x))

    silent = quick(Words(*trained()), control="auto", loss=lambda o, y: F.cross_entropy(o.scores, y))
    assert silent.control is None and "its answers cannot be compared" in "".join(silent.notes)
    model, (pruned, _) = trained(), pair_of_models()
    taught = quick(model, Taught(noisy_loader(), trained()), control="auto", loss=distilled(F.cross_entropy))
    assert taught.control is taught.teacher is None and "no control" not in "".join(taught.notes)
    assert finetune(pruned, noisy_loader(), **recipe()).control is None
    assert finetune(trained(), noisy_loader(), **recipe(), scheme="2:4").control is None


def test_a_run_that_began_without_a_control_goes_on_without(tmp_path):
    quick(trained(), checkpoint=tmp_path)
    again = quick(trained(), checkpoint=tmp_path, control="auto")
    assert again.control is None and "began without" in "".join(again.notes)
    (tmp_path / "sparse.pt").unlink()  # killed before the first epoch ended
    again = quick(trained(), checkpoint=tmp_path, control="auto")
    assert again.control is None and "began without" in "".join(again.notes)


def stopping(at):
    """A loss that interrupts the training at a step."""
    steps = []

    def loss(output, target):
        steps.append(output.requires_grad)
        if sum(steps) == at:
            raise KeyboardInterrupt
        return F.cross_entropy(output, target)

    return loss


@pytest.mark.parametrize("stop", [2, 9, 14, 21])
def test_a_run_that_is_taught_is_not_continued_without(tmp_path, stop):
    with pytest.raises(KeyboardInterrupt):
        quick(trained(), checkpoint=tmp_path, control="auto", loss=stopping(stop))
    files = sorted(path.name for path in tmp_path.iterdir())
    for changed in ({"control": None}, {"control": trained(), "teacher": None}):
        model = trained()
        with pytest.raises(TrainingError, match=r"of another run[\s\S]*teacher: the control[\s\S]*teacher: nobody"):
            quick(model, checkpoint=tmp_path, **changed)
        assert not masks.of(model) and sorted(path.name for path in tmp_path.iterdir()) == files
    assert quick(trained(), checkpoint=tmp_path, control="auto").control is not None


def test_a_run_without_a_teacher_is_not_continued_with_one(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        quick(trained(), checkpoint=tmp_path, loss=stopping(8))
    for given in ({"control": trained()}, {"teacher": trained(1)}):
        with pytest.raises(TrainingError, match=r"of another run[\s\S]*teacher: nobody"):
            quick(trained(), checkpoint=tmp_path, **given)
        assert not (tmp_path / "control.pt").exists(), "refused before the control is trained"
    compared = quick(trained(), checkpoint=tmp_path, control=trained(), teacher=None)
    assert compared.control is not None and compared.teacher is None


def test_an_end_before_the_first_step_leaves_a_word_about_the_model():
    def failing(model):
        raise RuntimeError("no images")

    model = trained()
    with pytest.raises(RuntimeError, match="no images") as caught:
        quick(model, control=None, evaluate=failing)
    assert "The sparse model has had no step of training; what finetune pruned stays pruned." in caught.value.__notes__
    assert masks.of(model)


@pytest.mark.parametrize("own", [True, False])
def test_a_control_that_ends_early_leaves_a_word_about_the_model(own, tmp_path):
    for given, hint in (({}, "(with checkpoint="), ({"checkpoint": tmp_path}, ", and the run goes on.")):
        with pytest.raises(KeyboardInterrupt) as caught:
            quick(trained(), control="auto" if own else trained(), loss=stopping(3), **given)
        told = " ".join(caught.value.__notes__)
        assert "pruned and not trained yet; hand the dense model over again" in told and hint in told
        assert ("finetune's own copy" in told) == own
    pruned, control = pair_of_models()
    with pytest.raises(KeyboardInterrupt) as caught:
        finetune(pruned, noisy_loader(), **{**recipe(), "loss": stopping(3)}, control=control)
    assert not hasattr(caught.value, "__notes__"), "the model is as it came"


@pytest.mark.parametrize("who", [{"control": "auto"}, {"teacher": "dense"}])
def test_the_copies_are_gone_when_it_returns(who, monkeypatch):
    made, copied = [], controls.copied

    def told(*given):
        found = copied(*given)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(controls, "copied", told)
    gc.collect()
    gc.disable()
    try:
        result = quick(trained(), **who)
        assert result.teacher is not None and [ref() for ref in made] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("bad", [0, 1])
def test_held_data_without_a_finite_loss_are_refused_before_anything(bad):
    data = Noisy()
    held = [(data.x[:8], data.y[:8]), (data.x[8:16], data.y[8:16])]
    held[bad] = (torch.full_like(held[bad][0], float("nan")), held[bad][1])
    model, (pruned, _) = trained(), pair_of_models()
    with pytest.raises(
        TrainingError, match=rf"not finite before the first step[\s\S]*nan in batch {bad + 1} of `held`"
    ):
        quick(model, held=held)
    assert not masks.of(model)
    with pytest.raises(TrainingError, match=r"of `held`[\s\S]*bad values"):
        finetune(pruned, noisy_loader(), **recipe(), held=held, keep="loss")


def test_what_is_said_of_a_control_that_is_not_there():
    (pruned, _), low = pair_of_models(), twofour.quantize(trained(), weights="w4", activations="a4", data=[Noisy().x])
    advice = "no comparison: control=copy.deepcopy(model), copied before it is pruned, brings one"
    assert finetune(pruned, noisy_loader(), **recipe()).notes[-1] == advice
    assert advice in quick(trained(), control="auto", teacher=trained(1)).notes
    (masked, _), given = pair_of_models(), {"optimizer": optimizer, "epochs": 1, "progress": False}
    for result in (
        finetune(low, noisy_loader(), loss=F.cross_entropy, **given),
        finetune(masked, noisy_loader(), loss=F.cross_entropy, **given, control=None),
        quick(trained(), epochs=1),
        quick(trained(), control="auto", optimizer="auto", epochs=1),
    ):
        told = str(result)
        assert result.control is None and advice not in told and "flatters" not in told
        assert told.count("control=copy.deepcopy") == ("training is not known" in told)


def test_memory_of_an_optimiser_is_told_where_it_is_known():
    notes = [next(n for n in quick(trained(), optimizer=o, epochs=1).notes if "MiB" in n) for o in (optimizer, "auto")]
    assert notes[0].endswith("what the optimiser keeps") and notes[1].endswith("keeps, twice the gradients")


class Drawing(nn.Sequential):
    def forward(self, x):
        return super().forward(x + 0.01 * torch.randn_like(x))


def test_a_teacher_that_draws_leaves_the_data_as_they_were():
    class Seen:
        def __init__(self):
            self.inputs = []

        def __len__(self):
            return 6

        def __iter__(self):
            for inputs, target in DataLoader(Noisy(), 8):
                self.inputs.append(inputs)
                yield inputs, target

    seen = []
    for teacher in (trained(), Drawing(*trained())):
        loader = Seen()
        quick(trained(), loader, teacher=teacher)
        seen.append(torch.cat(loader.inputs))
    assert torch.equal(*seen)


def test_a_teacher_of_another_shape_is_refused_before_pruning():
    model = trained()
    other = nn.Linear(16, 3)
    for given in ({"teacher": other}, {"teacher": other, "control": trained()}):
        with pytest.raises(TrainingError, match=r"cannot be compared[\s\S]*\(8, 4\) and \(8, 3\)"):
            quick(model, **given)
        assert not masks.of(model)


def test_a_pruned_model_has_no_teacher_by_itself():
    model, control = pair_of_models()
    assert finetune(model, noisy_loader(), **recipe(), control=control).teacher is None


class Stop(Exception):
    pass


class Counting(nn.Module):
    """Counts its steps in a buffer that is no part of its state dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.steps += int(self.training)
        return x


@pytest.mark.parametrize("end", [float("nan"), KeyboardInterrupt(), None])
def test_what_ends_a_run_early_leaves_the_best_state(end, tmp_path):
    model, _ = pair_of_models(dropout=0.0)
    model.append(Counting())
    answers, states, steps = iter([0.5, 0.9, 0.1, 0.2]), [], []

    def evaluate(m):
        states.append([copy.deepcopy(m.state_dict()), m[-1].steps.clone()])
        return next(answers)

    def loss(output, target):
        steps.append(1)
        if len(steps) == 15 and isinstance(end, KeyboardInterrupt):
            raise end
        return F.cross_entropy(output, target) * (end if len(steps) == 15 and end is not None else 1)

    def run(model=model):
        given = {**recipe(epochs=3), "loss": loss}
        return finetune(model, noisy_loader(), **given, evaluate=evaluate, keep="highest", checkpoint=tmp_path)

    if end is None:
        assert run().sparse.kept == 1 and len(states) == 4
    else:
        with pytest.raises((TrainingError, KeyboardInterrupt)) as caught:
            run()
        assert caught.value.__notes__ == ["The sparse model has its state after epoch 1 of 3, the best so far."]
        assert checkpoint.read(tmp_path / "sparse.pt")["position"]["epoch"] == 2
    kept, counted = states[1]
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert model[-1].steps == counted == 6
    buffers = checkpoint.read(tmp_path / "sparse.pt")["best"]["buffers"]
    assert buffers.keys() == {"5.steps"} and buffers["5.steps"] == 6
    if end is not None:
        again, _ = pair_of_models(dropout=0.0)
        again.append(Counting())
        assert run(again).sparse.kept == 1 and same_state(again, model) and again[-1].steps == 6


def test_a_better_state_is_copied_into_the_tensors_of_the_last():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("spread", torch.ones(1).expand(3))
    first = trainee._copied(model.state_dict(), {})
    assert all(value.data_ptr() != first[name].data_ptr() for name, value in model.state_dict().items())
    assert trainee._copied(model.state_dict(), first) is not first, "an expanded tensor cannot be written into"
    del model.spread
    first = trainee._copied(model.state_dict(), {})
    nn.init.constant_(model[0].weight, 3.0)
    places = {name: value.data_ptr() for name, value in first.items()}
    again = trainee._copied(model.state_dict(), first)
    assert {name: value.data_ptr() for name, value in again.items()} == places and again._metadata
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "stop, who",
    [(2, {"teacher": "dense"}), (9, {"teacher": "dense"}), *((stop, {"control": "auto"}) for stop in (2, 9, 15, 21))],
)
def test_stopped_it_goes_on_from_the_dense_model_to_the_same_bits(tmp_path, stop, who):
    start = trained()

    def after(folder, most, model=None):
        model, calls = model or copy.deepcopy(start), []

        def loss(output, target):
            if torch.is_grad_enabled():
                calls.append(1)
                if len(calls) > most:
                    raise Stop
            return F.cross_entropy(output, target)

        given = {"loss": loss, "evaluate": accuracy, **who}
        return model, quick(model, checkpoint=folder, checkpoint_every=2, **given), len(calls)

    model = copy.deepcopy(start)
    with pytest.raises(Stop):
        after(tmp_path / "a", stop, model)
    written = (tmp_path / "a" / "start.pt").stat().st_mtime_ns
    with pytest.raises(TrainingError, match=r"began with a dense model[\s\S]*load the dense model again"):
        after(tmp_path / "a", 99, model)
    resumed, result, calls = after(tmp_path / "a", 99)
    wanted, whole, all_calls = after(None, 99)
    assert (tmp_path / "a" / "start.pt").stat().st_mtime_ns == written, "pruned once"
    assert calls < all_calls and same_state(resumed, wanted)
    assert result.sparse.history == whole.sparse.history and result.notes == whole.notes
    assert result.difference == whole.difference and (result.difference is None) == ("teacher" in who)
    assert (result.sparse.held, result.sparse.kept) == (whole.sparse.held, whole.sparse.kept)
    with pytest.raises(TrainingError, match=r"of another run[\s\S]*dense model: "):
        after(tmp_path / "a", 99, trained(1))
    (tmp_path / "a" / "start.pt").write_bytes(b"no checkpoint")
    with pytest.raises(FormatError, match="cannot be read"):
        after(tmp_path / "a", 99)


def test_a_run_with_a_teacher_is_not_continued_without_one(tmp_path):
    (model, control), (other, _) = pair_of_models(), pair_of_models()
    finetune(model, noisy_loader(), **recipe(), teacher=copy.deepcopy(control), checkpoint=tmp_path)
    with pytest.raises(TrainingError, match=r"of another run[\s\S]*got +teacher: another model"):
        finetune(other, noisy_loader(), **recipe(), checkpoint=tmp_path)


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
    assert defaults.optimizer_for(model.bfloat16())[1] > 0


def test_what_is_not_trained_is_told():
    model = trained()
    model[0].weight.requires_grad_(False)
    told = "".join(quick(model).notes)
    assert "1 of them frozen, so not trained again: 0.weight" in told


def test_the_loss_that_is_shown_is_that_of_the_state_that_stands():
    history = tuple(Epoch(number, loss, 0.1, 0.5) for number, loss in ((1, 0.25), (2, 0.75)))
    shown = [str(Result(Run("sparse", 0.5, history, 1.0, None, kept), None, 0)).split("\n")[1] for kept in (None, 1, 0)]
    assert [line.split()[3] for line in shown] == ["0.7500", "0.2500", "-"]


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
    build, rate = defaults.optimizer_for(model)
    assert rate == pytest.approx(2e-4) and build(list(model.parameters())).param_groups[0]["lr"] == rate
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
        assert "which all states have seen: held= takes others" in "".join(result.notes)


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


def test_the_first_batches_of_the_training_judge():
    x = torch.arange(8000.0).view(-1, 1)
    for rows, batch, judging in ((400, 16, 128), (4000, 16, 208), (8000, 400, 400), (8000, 2000, 2000), (100, 16, 100)):
        loader = DataLoader(TensorDataset(x[:rows], x[:rows]), batch, shuffle=True)
        held = judge.trained_on(loader, 3)
        found = torch.cat([inputs for inputs, _ in held.batches])
        assert held.samples == len(found) == judging and not held.apart
        first = torch.cat([inputs for inputs, _ in epoch_batches(loader, 3, 0)])[:judging]
        assert torch.equal(found, first), "those that the training begins with"
        again = judge.trained_on(loader, 3)
        assert held.fingerprint == again.fingerprint != judge.trained_on(loader, 4).fingerprint

    class Unmeasured:
        def __iter__(self):
            return iter([(part, part) for part in x.split(100)])

    assert judge.trained_on(Unmeasured(), 0).samples == 1100  # more than 1024 are not wanted
    with pytest.raises(TrainingError, match="loader is empty"):
        judge.trained_on(type("Nothing", (), {"__iter__": lambda self: iter(())})(), 0)


def test_all_data_are_trained_on_and_a_schedule_reaches_its_end():
    seen = []

    def loss(output, target):
        seen.append(len(target) if torch.is_grad_enabled() else 0)
        return F.cross_entropy(output, target)

    batches = list(DataLoader(Noisy(), 4))
    rates = lambda opt: torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 2 * len(batches) - 1)  # noqa: E731
    result = quick(trained(), batches, loss=loss, schedule=rates)
    assert sum(seen) == 2 * len(Noisy()) and result.sparse.history[-1].lr == pytest.approx(0.05 * 0.1)
    assert "few to tell states apart: held= takes more" in "".join(result.notes)


def test_a_start_that_knows_the_data_by_heart_does_not_win_by_them():
    """Labels are chance, so that what the dense model knows of a sample is memory: no training finds it again."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(96, 16, generator=generator), torch.randint(4, (96,), generator=generator)
    wide = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))
    adam = {"loss": F.cross_entropy, "optimizer": lambda params: torch.optim.Adam(params, lr=1e-2), "progress": False}
    alone = {"control": None, "prune": QUICK}
    train(wide, list(zip(x.split(8), y.split(8), strict=True)), **adam, epochs=30)
    assert float((wide(x).argmax(1) == y).float().mean()) > 0.95
    half = list(zip(x[:48].split(8), y[:48].split(8), strict=True))
    judged = {"": None, "the other half": [(x[48:], y[48:])]}
    results = [finetune(copy.deepcopy(wide), half, **adam, **alone, epochs=8, held=h) for h in judged.values()]
    assert [result.sparse.kept > 0 for result in results] == [True, False]
    assert results[0].sparse.history[-1].held < results[0].sparse.held


def test_data_that_are_held_by_the_caller_judge_the_same_whatever_was_drawn_before(tmp_path):
    held, results = noisy_loader(own_generator=True), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state, own = torch.get_rng_state(), held.generator.get_state()
        results.append(quick(trained(), held=held))
        assert torch.equal(torch.get_rng_state(), state) and torch.equal(held.generator.get_state(), own)
    assert results[0].sparse.held == results[1].sparse.held
    assert judge.given(held, 0).nbytes == Noisy().x.nbytes + Noisy().y.nbytes
    big = [(torch.zeros(2**14, 16), torch.zeros(2**14, dtype=torch.long))]
    assert "the data that judge 1.1" in "".join(quick(trained(), held=big, epochs=1).notes)
    quick(trained(), held=held, checkpoint=tmp_path, epochs=2)
    for other in (DataLoader(Noisy(seed=4), 8), DataLoader(Noisy(rows=40), 8)):
        with pytest.raises(TrainingError, match=r"of another run[\s\S]*held: "):
            quick(trained(), held=other, checkpoint=tmp_path, epochs=2)


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


@in_turn(
    "output, target, name",
    [
        (torch.randn(8, 4), torch.zeros(8, dtype=torch.long), "cross entropy"),
        (torch.randn(8, 4, 5), torch.zeros(8, 5, dtype=torch.long), "cross entropy"),
        (torch.randn(8, 5, 4), torch.zeros(8, 5, dtype=torch.long), "cross entropy"),
        (torch.randn(8, 2), torch.randn(8, 2), "squared error"),
        (SimpleNamespace(loss=torch.tensor(2.0)), None, "own"),
        (torch.randn(8), torch.ones(8), None),
        (torch.randn(8, 1), torch.zeros(8, dtype=torch.long), None),
        ("words", None, None),
    ],
)
def test_the_first_batch_tells_the_loss(output, target, name):
    class Answering(nn.Module):
        def forward(self, x):
            return output

    loader = [(torch.zeros(8, 3), target)]
    if name is None:
        with pytest.raises(TrainingError, match=r"which loss is meant[\s\S]*pass loss="):
            defaults.loss_for(Answering(), loader, 0)
        return
    loss, said = defaults.loss_for(Answering(), loader, 0)
    assert name in said
    if name == "own":
        assert loss(output, target) == 2
    elif name == "squared error":
        torch.testing.assert_close(loss(output, target), (output - target).square().mean())
    else:
        classes = output.movedim(1, -1) if output.shape == (8, 4, 5) else output
        wanted = F.cross_entropy(classes.reshape(-1, 4), target.flatten())
        torch.testing.assert_close(loss(output, target), wanted)


@pytest.mark.parametrize("right, guided, share", [(-9.0, True, 0.5), (9.0, True, 0.0), (9.0, False, 0.5)])
def test_a_guiding_teacher_teaches_where_it_is_better(right, guided, share):
    x, y = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    plan = Plan([(x, y)], F.cross_entropy, optimizer, None, 1)
    lesson = Lesson(plan, nn.Linear(4, 4), "classes", lambda output: output, guided=guided)
    assert lesson.teaches != guided
    _, target = next(iter(lesson))
    output = torch.zeros(8, 4)
    output[:, 0] = right
    torch.testing.assert_close(lesson.loss(output, target), distilled(F.cross_entropy, weight=share)(output, target))
    assert lesson.teaches == (share > 0)


def test_a_loader_that_brings_a_teacher_has_no_other(monkeypatch):
    monkeypatch.setattr(controls, "copied", lambda model: pytest.fail("nobody asked for a copy"))
    model = trained()
    taught = Taught(noisy_loader(), copy.deepcopy(model))
    result = quick(model, taught, loss=distilled(F.cross_entropy), teacher="dense")
    assert result.teacher is None and masks.of(model)
    assert quick(trained()).teacher is None
