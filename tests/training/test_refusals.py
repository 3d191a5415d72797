"""What `finetune` refuses, and that the message says what was got, wanted, and what to try."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training.small import Noisy, noisy_loader, pair_of_models, recipe
from tests.turns import in_turn
from twofour import masks
from twofour.errors import MaskError, TrainingError
from twofour.training import finetune


def refusal(model, loader=None, **changes) -> str:
    with pytest.raises(TrainingError) as caught:
        finetune(model, noisy_loader() if loader is None else loader, **{**recipe(), **changes})
    return str(caught.value)


def test_an_optimiser_without_the_masked_weights():
    model, _ = pair_of_models()
    text = refusal(model, optimizer=lambda params: torch.optim.SGD([p for p in params if p.ndim == 1], lr=0.1))
    assert "2 of 2 missing: 0.weight, 4.weight" in text and "lambda params" in text


def test_a_loss_that_is_not_finite_says_where_and_leaves_the_weights():
    model, _ = pair_of_models()
    calls = []

    def loss(output, target):
        calls.append(1)
        return nn.functional.cross_entropy(output, target) * (float("nan") if len(calls) == 9 else 1.0)

    text = refusal(model, loss=loss)
    assert "sparse run is not finite at epoch 2, step 3\n" in text and "got     nan" in text
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert model.training


def test_a_loss_of_many_numbers():
    model, _ = pair_of_models()
    text = refusal(model, loss=lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"))
    assert "got     (8,)" in text and ".mean()" in text


@pytest.mark.parametrize("loader", [[], iter([(torch.randn(2, 16), torch.zeros(2).long())])])
def test_a_loader_that_cannot_fill_the_epochs(loader):
    model, _ = pair_of_models()
    text = refusal(model, loader)
    assert "the loader is empty" in text or "walked only once" in text


def test_a_loader_of_unknown_length_that_yields_nothing():
    class Nothing:
        def __iter__(self):
            return iter(())

    model, _ = pair_of_models()
    assert "the loader is empty" in refusal(model, Nothing())


@pytest.mark.parametrize("batch", [torch.zeros(2, 16), {"x": 1}, (1, 2, 3)])
def test_batches_that_are_no_pairs(batch):
    model, _ = pair_of_models()
    assert "pairs (input, target)" in refusal(model, [batch])


@in_turn(
    "changes, words",
    [
        ({"epochs": 0}, "`epochs` cannot be used\n"),
        ({"epochs": True}, "at least 1"),
        ({"checkpoint_every": -1}, "`checkpoint_every`"),
        ({"schedule_every": "batch"}, '"step" or "epoch"'),
        ({"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}, "waits for a metric"),
        ({"evaluate": lambda m: "good"}, "must return a number"),
        ({"evaluate": 3}, "`evaluate` cannot be called"),
        ({"loss": None}, "`loss` cannot be called"),
        ({"optimizer": None}, "`optimizer` cannot be called"),
        ({"optimizer": "SGD"}, "lambda params: torch.optim.SGD"),
        ({"optimizer": lambda params: None}, "NoneType, which has no `param_groups`"),
        ({"schedule": 3}, "`schedule` cannot be called"),
        ({"schedule": lambda optimizer: 3}, "int, which has no `step`"),
        ({"seed": "x"}, "`seed` cannot be used"),
        ({"seed": 1.5}, "`seed` cannot be used"),
        ({"seed": None}, "`seed` cannot be used"),
        ({"checkpoint": 3}, "`checkpoint` names no file or folder"),
        ({"checkpoint": ""}, "`checkpoint` names no file or folder"),
    ],
)
def test_arguments_that_cannot_be_used(changes, words):
    model, _ = pair_of_models()
    assert words in refusal(model, **changes)


@pytest.mark.parametrize("loader", [None, 3])
def test_what_is_no_loader(loader):
    model, _ = pair_of_models()
    with pytest.raises(TrainingError, match="there is no loader"):
        finetune(model, loader, **recipe())


@pytest.mark.parametrize("control", [5, {}, nn.Linear])
def test_a_control_that_is_no_module(control):
    model, _ = pair_of_models()
    assert "the control cannot be compared" in refusal(model, control=control)


def test_workers_that_outlive_the_epoch():
    model, _ = pair_of_models()
    loader = DataLoader(Noisy(), 8, num_workers=1, persistent_workers=True)
    assert "persistent_workers=False" in refusal(model, loader)


def test_a_control_that_is_no_control():
    model, control = pair_of_models()
    assert "the pruned model itself" in refusal(model, control=model)
    assert "2 masked weights" in refusal(model, control=copy.deepcopy(model))
    control[1] = model[1]
    assert "shared with the pruned model: 1.weight, 1.bias" in refusal(model, control=control)
    assert "`0.weight` is (3, 16)" in refusal(model, control=nn.Sequential(nn.Linear(16, 3)))


def test_a_weight_that_comes_alive_behind_the_optimisers_back():
    model, _ = pair_of_models()
    mask = masks.of(model)["0.weight"]

    schedule_calls = []

    class Meddling(torch.optim.lr_scheduler.ConstantLR):
        def step(self, epoch=None):
            super().step()
            schedule_calls.append(1)
            if len(schedule_calls) == 7:  # the last step of the first epoch; the constructor made the first call
                with torch.no_grad():
                    model[0].weight[~mask.keep] = 1.0

    with pytest.raises(MaskError) as caught:
        finetune(model, noisy_loader(), **{**recipe(), "schedule": Meddling})
    assert "layer `0.weight`" in str(caught.value) and "after epoch 1" in str(caught.value)
    assert "256 non-zero entries" in str(caught.value)


@pytest.mark.parametrize("norm", [-1.0, 0, float("nan"), "1", np.float32(0)])
def test_a_norm_that_would_turn_the_gradients_round(norm):
    model, _ = pair_of_models()
    before = copy.deepcopy(model.state_dict())
    assert "`clip_norm` is impossible" in refusal(model, clip_norm=norm)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
