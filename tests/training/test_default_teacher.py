"""Who teaches in `finetune`: the control, a loader or nobody, and runs that go on with another than they began with."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.training.default import optimizer, quick, stopping, trained
from tests.training.small import Noisy, noisy_loader, pair_of_models, recipe
from twofour import masks
from twofour.errors import TrainingError
from twofour.training import Taught, controls, distilled, finetune
from twofour.training.lesson import Lesson
from twofour.training.plan import Plan


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


def test_a_run_with_a_teacher_is_not_continued_without_one(tmp_path):
    (model, control), (other, _) = pair_of_models(), pair_of_models()
    finetune(model, noisy_loader(), **recipe(), teacher=copy.deepcopy(control), checkpoint=tmp_path)
    with pytest.raises(TrainingError, match=r"of another run[\s\S]*got +teacher: another model"):
        finetune(other, noisy_loader(), **recipe(), checkpoint=tmp_path)


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
