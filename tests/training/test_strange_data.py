"""A loader that yields other data than a dense model's batch norms know is told before it is pruned."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twofour
from twofour.training import judge, strange_data, train
from twofour.training.plan import Plan

BORDER = -4.0
"""Of the sequences that the model has converged on."""


class Inside(nn.Module):
    """The mean over what is not border: it is seen by the norms alone."""

    def forward(self, x):
        return x[:, :, 4:-4].mean(2)


def batches(seed: int, count: int = 8, size: int = 64, border: float = BORDER):
    """Sequences (size, 8, 16) around one of four centres, four places at each end `border`, and which it is."""
    torch.manual_seed(seed)
    centres = torch.randn(4, 8, generator=torch.Generator().manual_seed(7))
    found = []
    for _ in range(count):
        labels = torch.randint(4, (size,))
        inside = centres[labels][..., None] + 1.5 * torch.randn(size, 8, 8)
        found.append((F.pad(inside, (4, 4), value=border), labels))
    return found


@pytest.fixture(scope="module")
def converged() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv1d(8, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), Inside(), nn.Linear(32, 4)]
    model = nn.Sequential(*layers)
    train(model, batches(1), loss=F.cross_entropy, optimizer=_sgd, epochs=12, progress=False)
    return model.eval()


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plan(loader, held=None) -> Plan:
    judging = judge.Judge("loss", F.cross_entropy, held)
    return Plan(loader, F.cross_entropy, _sgd, None, 1, judge=judging)


def test_other_data_than_the_norms_know_are_told_and_the_model_is_as_it_was(converged, caplog):
    loader = batches(2, border=8.0)
    before = {name: value.clone() for name, value in converged.state_dict().items()}
    drawn = torch.get_rng_state()
    (said,) = strange_data.told(converged, plan(loader))
    assert said.startswith("the loader yields other data than the batch norms know: the variance in `1` is off by ")
    assert said in caplog.messages
    assert all(torch.equal(before[name], value) for name, value in converged.state_dict().items())
    assert converged[1].momentum == 0.1 and not any(module.training for module in converged.modules())
    assert torch.equal(drawn, torch.get_rng_state())


def test_the_data_of_its_own_training_are_not_told_whatever_judges(converged):
    assert strange_data.told(converged, plan(batches(3))) == ()
    held = judge.Held(tuple(batches(4, border=8.0)), 512, apart=True)
    assert strange_data.told(converged, plan(batches(3), held)) == (), "validation data are not trained on"


def test_nothing_is_told_of_too_few_data_of_other_norms_or_of_norms_that_know_nothing_yet(converged):
    strange = batches(2, border=8.0)
    assert strange_data.told(converged, plan(strange[:2])) == ()
    alone = [(x[:1], y[:1]) for x, y in strange] * 40
    assert strange_data.told(converged, plan(alone)) == (), "a sample has no variance"
    for norm in (nn.GroupNorm(4, 32), nn.BatchNorm1d(32, track_running_stats=False), nn.BatchNorm1d(32)):
        model = nn.Sequential(nn.Conv1d(8, 32, 1), norm, nn.ReLU(), Inside(), nn.Linear(32, 4))
        assert strange_data.told(model, plan(strange)) == ()


def test_a_list_is_told_by_whole_batches_and_that_it_may_be_sorted(converged):
    inside = [(x[labels.argsort()], labels.sort().values) for x, labels in batches(2)]
    assert strange_data.told(converged, plan(inside)) == (), "the order within a batch is no matter"
    (said,) = strange_data.told(converged, plan(batches(2, border=8.0)))
    assert said.endswith("did, or shuffle: batches of a list that is sorted are of one kind")

    class Walked(list):
        def __iter__(self):
            return super().__iter__()

    (said,) = strange_data.told(converged, plan(Walked(batches(2, border=8.0))))
    assert said.endswith("augment as the model's own training did")


def test_a_loss_below_zero_or_near_it_is_no_reason(converged):
    right = lambda output, labels: -output.softmax(1)[torch.arange(len(labels)), labels].mean()  # noqa: E731
    assert strange_data.told(converged, replace(plan(batches(3)), loss=right)) == ()
    assert len(strange_data.told(converged, replace(plan(batches(2, border=40.0)), loss=right))) == 1
    hardly = lambda output, labels: 1e-3 * F.cross_entropy(output, labels)  # noqa: E731
    assert strange_data.told(converged, replace(plan(batches(2, border=8.0)), loss=hardly)) == ()


def test_norms_that_are_not_run_say_nothing(converged):
    model = copy.deepcopy(converged)
    model[1].aside = nn.BatchNorm1d(32)
    model[1].aside.running_var.fill_(1e-4)
    assert strange_data.told(model, plan(batches(3))) == ()
    (said,) = strange_data.told(model, plan(batches(2, border=8.0)))
    assert "the variance in `1` is off" in said and model[1].aside.running_var[0] == 1e-4


def test_batches_of_one_are_not_walked_to_the_end(converged):
    class Endless:
        def __iter__(self):
            while True:
                yield torch.zeros(1, 8, 16), torch.zeros(1, dtype=torch.long)

    assert strange_data.told(converged, plan(Endless())) == ()


def test_finetune_says_it_among_its_notes(converged, caplog):
    caplog.set_level(logging.WARNING)
    given = {"loss": F.cross_entropy, "optimizer": _sgd, "epochs": 1, "progress": False, "control": None}
    given["prune"] = {"criterion": "magnitude", "permute": False, "eligibility": "any"}
    for border, times in ((8.0, 1), (BORDER, 0)):
        result = twofour.finetune(copy.deepcopy(converged), batches(5, border=border), **given)
        assert sum("other data than the batch norms know" in note for note in result.notes) == times
