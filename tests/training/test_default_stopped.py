"""`finetune` that ends early, by an error or a kill, leaves the best state and goes on to the same bits."""

import copy
import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.training.default import quick, trained
from tests.training.small import accuracy, noisy_loader, pair_of_models, recipe, same_state
from twofour import masks
from twofour.errors import FormatError, TrainingError
from twofour.training import checkpoint, finetune, trainee


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


@pytest.mark.parametrize("end", [float("nan"), signal.SIGINT, None])
def test_what_ends_a_run_early_leaves_the_best_state(end, tmp_path):
    model, _ = pair_of_models(dropout=0.0)
    model.append(Counting())
    answers, states, steps = iter([0.5, 0.9, 0.1, 0.2]), [], []

    def evaluate(m):
        states.append([copy.deepcopy(m.state_dict()), m[-1].steps.clone()])
        return next(answers)

    def loss(output, target):
        steps.append(1)
        if len(steps) == 15 and end is signal.SIGINT:
            os.kill(os.getpid(), end)
        return F.cross_entropy(output, target) * (end if len(steps) == 15 and isinstance(end, float) else 1)

    def run(model=model):
        given = {**recipe(epochs=3), "loss": loss}
        return finetune(model, noisy_loader(), **given, evaluate=evaluate, keep="highest", checkpoint=tmp_path)

    if end is None:
        assert run().sparse.kept == 1 and len(states) == 4
    else:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
        try:
            with pytest.raises((TrainingError, KeyboardInterrupt)) as caught:
                run()
        finally:
            signal.signal(signal.SIGINT, before)
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


def test_an_end_before_the_first_step_leaves_a_word_about_the_model():
    def failing(model):
        raise RuntimeError("no images")

    model = trained()
    with pytest.raises(RuntimeError, match="no images") as caught:
        quick(model, control=None, evaluate=failing)
    assert "The sparse model has had no step of training; what finetune pruned stays pruned." in caught.value.__notes__
    assert masks.of(model)


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
