"""The workflow: what is repeated, that the control has the same training, that neither run disturbs the other."""

import copy
import json
import random

import numpy as np
import pytest
import torch
from torch import nn

import twofour
from tests.training.small import accuracy, dense_model, noisy_loader, pair_of_models, recipe, same_state
from twofour import masks
from twofour.training import finetune, train
from twofour.training.result import Epoch, Result, Run


def test_it_is_the_plain_loop_with_zeros_put_back():
    batches = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(5)]
    model, _ = pair_of_models(dropout=0.0)
    reference = nn.Sequential(*copy.deepcopy(list(dense_model(dropout=0.0))))
    reference.load_state_dict(model.state_dict())
    keep = {name: mask.keep.clone() for name, mask in masks.of(model).items()}

    finetune(
        model,
        batches,
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2),
        schedule=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5),
        schedule_every="epoch",
        epochs=3,
        progress=False,
    )

    reference.train()
    momentum = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    for epoch in range(3):
        for x, y in batches:
            reference.zero_grad()
            nn.functional.cross_entropy(reference(x), y).backward()
            for name, p in reference.named_parameters():
                momentum[name] = 0.9 * momentum[name] + p.grad + 1e-2 * p.detach()
                p.data -= 0.1 * 0.5**epoch * momentum[name]
                if name in keep:
                    p.data[~keep[name]] = 0
                    momentum[name][~keep[name]] = 0
    for name, p in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-4, atol=1e-5)


def test_masks_hold_and_the_history_is_whole():
    model, control = pair_of_models()
    keep = {name: mask.keep.clone() for name, mask in masks.of(model).items()}
    result = finetune(model, noisy_loader(), **recipe(epochs=3), evaluate=accuracy, control=control)
    assert len(keep) == 2
    for name, kept in keep.items():
        assert torch.equal(masks.of(model)[name].keep, kept)
        assert not model.get_parameter(name)[~kept].any() and model.get_parameter(name)[kept].all()
    for run in (result.sparse, result.control):
        assert [epoch.epoch for epoch in run.history] == [1, 2, 3]
        assert run.history[-1].loss < run.history[0].loss
        assert run.history[0].lr > run.history[-1].lr > 0
        assert run.evaluation == run.history[-1].evaluation > run.before
    assert result.difference == result.sparse.evaluation - result.control.evaluation
    assert json.loads(json.dumps(result.to_dict()))["sparse"]["history"][2]["epoch"] == 3


def test_neither_run_disturbs_the_other():
    model, control = pair_of_models()
    finetune(model, noisy_loader(), **recipe(), evaluate=accuracy, control=control)
    alone, control_alone = pair_of_models()
    finetune(alone, noisy_loader(), **recipe())
    train(control_alone, noisy_loader(), **recipe())
    assert same_state(model, alone) and same_state(control, control_alone)
    assert not same_state(model, control)


def test_the_seed_fixes_the_result_whatever_was_drawn_before():
    finals = []
    for seed in (5, 5, 6):
        model, _ = pair_of_models()
        torch.rand(7), np.random.rand(7), random.random()
        finetune(model, noisy_loader(), **recipe(), seed=seed)
        finals.append(model)
    assert same_state(finals[0], finals[1]) and not same_state(finals[0], finals[2])


@pytest.mark.parametrize("own_generator", [False, True])
def test_random_state_of_the_caller_is_left_alone(own_generator):
    model, _ = pair_of_models()
    loader = noisy_loader(own_generator)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    order = loader.generator.get_state() if own_generator else None
    finetune(model, loader, **recipe(), evaluate=accuracy)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])
    assert order is None or torch.equal(loader.generator.get_state(), order)
    assert model.training


class Recorder:
    """A loader that notes the targets it hands out, per epoch."""

    def __init__(self, loader):
        self.loader, self.seen = loader, []

    def __len__(self):
        return len(self.loader)

    @property
    def generator(self):
        return self.loader.generator

    def __iter__(self):
        self.seen.append([])
        for x, y in self.loader:
            self.seen[-1].append(x)
            yield x, y


@pytest.mark.parametrize("own_generator", [False, True])
def test_both_runs_see_the_same_batches_whatever_the_models_draw(own_generator):
    model, control = pair_of_models(dropout=0.5)
    control[3].p = 0.0  # the control draws no random numbers, the sparse model does
    loader = Recorder(noisy_loader(own_generator))
    finetune(model, loader, **recipe(), control=control)
    control_first, control_second, first, second = (torch.cat(epoch) for epoch in loader.seen)
    assert torch.equal(first, control_first) and torch.equal(second, control_second)
    assert not torch.equal(first, second)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, x, scale):
        return self.fc(x) * scale


@pytest.mark.parametrize("form", ["tuple", "list", "dict"])
def test_inputs_may_be_several_arguments(form):
    model = TwoInputs()
    x, scale, y = torch.randn(8, 16), torch.ones(1), torch.randint(0, 4, (8,))
    inputs = {"tuple": (x, scale), "list": [x, scale], "dict": {"scale": scale, "x": x}}[form]
    before = model.fc.weight.detach().clone()
    train(model, [(inputs, y)], **{**recipe(), "schedule": None})
    assert not torch.equal(model.fc.weight, before)


def test_evaluate_may_answer_several_numbers():
    model, control = pair_of_models()
    result = finetune(
        model,
        noisy_loader(),
        **recipe(),
        control=control,
        evaluate=lambda m: {"accuracy": accuracy(m), "mode": m.training},
    )
    assert result.sparse.evaluation["mode"] == 0.0
    assert result.difference["accuracy"] == pytest.approx(
        result.sparse.evaluation["accuracy"] - result.control.evaluation["accuracy"]
    )


def test_gradients_can_be_clipped():
    batches = [(1e3 * torch.randn(8, 16), torch.randint(0, 4, (8,)))]
    model = nn.Sequential(nn.Linear(16, 4))
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    sgd = {
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda ps: torch.optim.SGD(ps, lr=1.0),
        "epochs": 1,
    }
    train(model, batches, **sgd, clip_norm=np.float32(0.5), progress=False)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert float((after - before).norm()) == pytest.approx(0.5, rel=1e-3)


def test_one_autocast_around_the_whole_training_is_as_good_as_one_a_step() -> None:
    """Autocast keeps casted parameters until it ends: without a word from the loop all steps used the first ones."""
    batches = [(torch.randn(64, 16), torch.randint(0, 4, (64,))) for _ in range(4)]
    around = dense_model(dropout=0.0)
    each = copy.deepcopy(around)
    forward = each.forward

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(x)

    each.forward = inside
    plan = {
        "loss": lambda y, target: nn.functional.cross_entropy(y.float(), target),
        "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.5),
        "epochs": 3,
        "progress": False,
    }
    with torch.autocast("cpu", torch.bfloat16):
        train(around, batches, **plan)
    train(each, batches, **plan)
    for name, p in each.named_parameters():
        torch.testing.assert_close(around.get_parameter(name), p, rtol=1e-6, atol=1e-6)


def test_what_is_evaluated_before_the_first_step_is_the_pruned_model() -> None:
    """In one autocast with what evaluated the dense model: its casted weights are of no use any more."""
    found = []
    for cached in (True, False):
        model = dense_model(dropout=0.0)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            accuracy(model)
            twofour.prune(model, "2:4", criterion="magnitude")
            plan = {**recipe(epochs=1), "evaluate": lambda m: float(m(torch.ones(1, 16)).float().norm())}
            found.append(finetune(model, noisy_loader(), **plan).sparse.before)
    assert found[0] == found[1]


def test_progress_goes_to_standard_error(capsys):
    model, _ = pair_of_models()
    finetune(model, noisy_loader(), **{**recipe(), "progress": True})
    seen = capsys.readouterr()
    assert seen.out == "" and "training sparse, steps: 12 of 12" in seen.err


def test_a_result_prints_both_runs_and_their_difference() -> None:
    epochs = (Epoch(1, 0.5, 0.1, 90.0), Epoch(2, 0.25, 0.01, 91.25))
    sparse, control = Run("sparse", 80.0, epochs, 1.0), Run("control", 90.0, epochs[:1], 1.0)
    lines = str(Result(sparse, control, 7)).splitlines()
    assert lines[1].split() == ["sparse", "80", "91.25", "0.2500", "2"]
    assert lines[2].split() == ["control", "90", "90", "0.5000", "1"]
    assert lines[3] == "sparse minus control: +1.25 (one run each, seed 7)"
    alone = Result(sparse, None, 7, None, ("no comparison: control=copy.deepcopy(model)",))
    assert str(alone).splitlines() == [*lines[:2], *alone.notes], "one note of what to do about it"
    named = Result(Run("sparse", None, (Epoch(1, 0.5, 0.1, {"f1": 0.5}),), 1.0), None, 0)
    assert "f1 0.5" in str(named)
