"""The copy of a dense model that `finetune` trains beside it: when there is one, and what is said without one."""

import copy
import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twofour
from tests.training.default import optimizer, quick, stopping, trained
from tests.training.small import Noisy, accuracy, noisy_loader, pair_of_models, recipe, same_state
from twofour import masks
from twofour.errors import TrainingError
from twofour.training import Taught, controls, distilled, finetune


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
    assert result.sparse.history == wanted.sparse.history and result.teacher == "the control"
    assert result.control.history == wanted.control.history and result.difference == wanted.difference is not None
    assert (result.sparse.instead is None) == same_state(model, by_hand)
    cost = next(note for note in result.notes if "forward pass of the control, which is trained first" in note)
    assert cost.endswith("control=None saves that") and "the control 0.0" in "".join(result.notes)
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
