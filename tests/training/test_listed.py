"""A list of batches in place of a loader: what judges and what calibrates is spread over it, and nothing does both."""

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.training.default import data_of_prune, quick, trained
from tests.training.small import CLASSES, Noisy, dense_model
from tests.turns import in_turn
from twofour.calibration import Batch
from twofour.errors import TrainingError
from twofour.training import finetune, judge, listed, rates, warm_start
from twofour.training.defaults import Adamw
from twofour.training.plan import Plan


class Placed:
    """A dataset of batches, which is walked by its places."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, place):
        return self.batches[place]


class Shuffling(Placed):
    def __iter__(self):
        return iter(random.sample(self.batches, len(self.batches)))


def sorted_by_class(rows, batch, classes=CLASSES):
    """Batches of as many rows of each class, one class after the other."""
    x = torch.randn(rows * classes, 16)
    y = torch.arange(classes).repeat_interleave(rows)
    return list(zip(x.split(batch), y.split(batch), strict=True))


def rows_of(batches):
    return {tuple(row) for x in batches for row in x.tolist()}


@pytest.fixture
def calibrated(monkeypatch):
    """What each call of `prune` was given as data, to the last."""
    return data_of_prune(monkeypatch)


@in_turn("kind", [list, tuple, Placed])
@in_turn("rows, batch, classes", [(64, 32, 4), (30, 16, 4), (512, 64, 10), (2048, 128, 10), (7, 8, 2), (256, 64, 31)])
def test_of_a_list_sorted_by_class_all_classes_judge_and_calibrate(kind, rows, batch, classes):
    data = sorted_by_class(rows, batch, classes)
    held = judge.trained_on(kind(data), 0)
    first, taken = 0, []
    for place, piece in listed.calibrating(kind(data), 0, held.places):
        taken.append((place, piece))
        first += piece.samples
        if first >= 1024:
            break
    assert not {place for place, _ in taken} & set(held.places)
    judging = torch.cat([y for _, y in held.batches])
    if 2 * classes <= len(data):
        assert set(judging.tolist()) == set(torch.cat([piece.target for _, piece in taken]).tolist())
        assert len(set(judging.tolist())) == classes
    assert held.samples == len(judging) and not held.apart
    assert held.samples >= min(128, rows * classes // 4) and held.samples < 1024 + batch
    assert len(held.places) <= len(data) // 2
    assert held.fingerprint == judge.trained_on(kind(data), 0).fingerprint


def test_no_batch_of_a_list_judges_and_calibrates(calibrated):
    data = sorted_by_class(64, 16)
    result = quick(trained(), data, control="auto", epochs=1)
    held = judge.trained_on(data, 0)
    judging = rows_of(data[place][0] for place in held.places)
    assert len(calibrated) == 2, "the model first, its trained control last"
    for batches in calibrated:
        assert not judging & rows_of(batch.inputs for batch in batches)
        assert {int(label) for batch in batches for label in batch.target} == set(range(CLASSES))
    told = "\n".join(result.notes)
    assert f"spread over the list, none of the {len(held.places)} that judge" in told
    assert f"on {held.samples} samples of the training" in told
    apart = quick(trained(), data, held=data[:1], epochs=1)
    assert "on 16 batches spread over the list" in "\n".join(apart.notes), "held= judges"


def test_calibration_takes_a_piece_of_each_batch_before_more_of_any():
    data = sorted_by_class(80, 40)
    taken = list(listed.calibrating(data, 0, but={2, 5}))
    assert sorted(place for place, _ in taken[:6]) == [0, 1, 3, 4, 6, 7]
    assert [piece.samples for _, piece in taken] == 12 * [16] + 6 * [8]
    assert rows_of(piece.inputs for _, piece in taken) == rows_of(x for n, (x, _) in enumerate(data) if n not in (2, 5))


def test_the_trials_of_the_rate_train_on_all_that_does_not_judge():
    data = sorted_by_class(64, 32)
    held = judge.trained_on(data, 0)
    plan = Plan(data, F.cross_entropy, Adamw(0.1), None, 1)
    given = rates._again(plan, held, 0)
    trained_on = [next(given) for _ in range(len(data))]
    judging = rows_of(x for x, _ in held.batches)
    assert {int(y[0]) for _, y in trained_on[:CLASSES]} == set(range(CLASSES))
    assert not judging & rows_of(x for x, _ in trained_on)
    assert judging | rows_of(x for x, _ in trained_on) == rows_of(x for x, _ in data)
    result = finetune(dense_model(), data, progress=False, teacher="dense", epochs=1)
    assert f"the loss on {held.samples} samples that 8 steps did not see" in "\n".join(result.notes)


def test_what_cannot_be_cut_judges_whole():
    """A row of targets that counts something else would be cut apart from its samples."""
    data = [(torch.randn(32, 16), torch.zeros(100)) for _ in range(64)]
    held = judge.trained_on(data, 0)
    assert all(len(x) == 32 and len(y) == 100 for x, y in held.batches) and held.samples == 512
    assert all(piece.samples == 32 for _, piece in listed.calibrating(data, 0, ()))
    assert len(list(listed.calibrating(data, 0, held.places))) == 64 - len(held.places)


def test_a_list_of_one_batch_does_all_and_a_loader_stays_as_it_is():
    one = sorted_by_class(8, 64)
    assert judge.trained_on(one, 0).samples == 32 and not judge.trained_on(one, 0).places
    assert "1 batch spread over the list" in quick(trained(), one, epochs=1).notes[-1]
    batches = sorted_by_class(16, 8)
    walked = warm_start.Calibration(Shuffling(one), 0)
    assert len(list(walked)) == 1 and walked.told == "1 batch of the loader, the first one"
    for loader in (
        DataLoader(Noisy(), 8, shuffle=True),
        Shuffling(batches),
        iter(batches),
        {1: 2},
        "ab",
        batches[0][0],
    ):
        assert not listed.is_list(loader)
    assert not judge.trained_on(Shuffling(batches), 0).places
    with pytest.raises(TrainingError, match="loader's batches cannot be used"):
        judge.trained_on([1, 2, 3], 0)


def test_random_numbers_that_a_list_draws_follow_from_the_seed():
    class Drawing(Placed):
        def __getitem__(self, place):
            x, y = self.batches[place]
            return x + torch.rand(1) + random.random(), y

    data: Any = Drawing(sorted_by_class(16, 8))
    state = torch.get_rng_state()
    one, again, other = (judge.trained_on(data, seed).fingerprint for seed in (1, 1, 2))
    assert one == again != other and torch.equal(torch.get_rng_state(), state)


@in_turn("batch, classes", [(256, 10), (32, 4), (64, 4), (128, 8)])
@in_turn("turns", [False, True])
def test_parts_of_batches_are_of_all_classes_however_their_rows_are_sorted(batch, classes, turns):
    """First rows are of one class where rows are sorted, and every so-many-th where classes take turns."""
    y = torch.arange(batch) % classes if turns else torch.arange(batch) * classes // batch
    data = [(torch.randn(batch, 16), y) for _ in range(64)]
    held = judge.trained_on(data, 0)
    pieces = list(listed.calibrating(data, 0, held.places))[:32]
    for labels in (torch.cat([y for _, y in held.batches]), torch.cat([piece.target for _, piece in pieces])):
        counts = labels.bincount(minlength=classes)
        assert counts.min() > 0.4 * len(labels) / classes and counts.max() < 2 * len(labels) / classes, counts


def test_each_range_of_mixed_samples_is_spread_over_all():
    x = torch.arange(1000.0)[:, None]
    mixed = listed.mixed(Batch(x, x + 1)).inputs[:, 0]
    assert torch.equal(mixed.sort().values, x[:, 0])
    for start, stop in ((0, 10), (0, 100), (100, 200), (900, 1000), (37, 62)):
        gaps = torch.cat([torch.zeros(1) - 1, mixed[start:stop].sort().values, torch.full((1,), 1000.0)]).diff()
        assert gaps.max() <= 2.7 * 1000 / (stop - start)
    assert torch.equal(listed.mixed(Batch(x, x + 1)).target[:, 0], mixed + 1)


def test_a_rest_too_small_for_batch_norm_is_not_trained_on():
    draw = torch.Generator().manual_seed(0)
    data = [(x := torch.randn(33, 16, generator=draw), x[:, :4].argmax(1)) for _ in range(8)]
    held = judge.trained_on(data, 0)
    judged = {place: len(y) for place, (_, y) in zip(held.places, held.batches, strict=True)}
    assert set(judged.values()) == {32}
    assert [len(x) for x, _ in listed.beside(data, 0, judged)] == 4 * [33]
    assert [len(x) for x, _ in listed.beside(data, 0, dict.fromkeys(judged, 25))] == [
        8 if place in judged else 33 for place in listed.spread(8)
    ]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    prune = {"criterion": "magnitude", "eligibility": "any", "permute": False}
    notes = finetune(model, data, loss=F.cross_entropy, epochs=1, progress=False, prune=prune).notes
    assert any("the learning rate is" in note for note in notes)


def test_items_of_another_size_each_time_and_empty_ones_calibrate():
    class Drawing(Placed):
        def __getitem__(self, place):
            count = random.randrange(2, 60)
            return torch.randn(count, 16), torch.zeros(count, dtype=torch.long)

    taken = list(listed.calibrating(Drawing(range(16)), 0, ()))
    assert {place for place, _ in taken} == set(range(16)) and all(0 < piece.samples <= 16 for _, piece in taken)
    empty = (torch.zeros(0, 16), torch.zeros(0, dtype=torch.long))
    assert [place for place, _ in listed.calibrating([empty, *sorted_by_class(2, 8)], 0, ())] == [1]
