import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import twofour
from twofour.errors import TrainingError
from twofour.training import Taught, distilled


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, :3].argmax(1))), batch_size=16)


def test_the_loss_is_hintons():
    generator = torch.Generator().manual_seed(0)
    output, answer = torch.randn(2, 5, 7, 11, generator=generator, dtype=torch.float64)
    target = torch.randint(11, (5, 7), generator=generator)
    found = distilled(lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()), weight=0.3, temperature=4.0)
    p, q = (answer / 4).softmax(-1), (output / 4).softmax(-1)
    divergence = (p * (p.log() - q.log())).sum(-1).mean()
    want = 0.7 * F.cross_entropy(output.flatten(0, 1), target.flatten()) + 0.3 * 16 * divergence
    torch.testing.assert_close(found(output, (target, answer)), want)
    values = distilled(lambda o, t: o.sum(), weight=1.0, kind="values")
    torch.testing.assert_close(values(output, (None, answer)), (output - answer).square().mean())


def test_finetune_takes_a_taught_loader_and_the_student_comes_nearer():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 16))
    student = twofour.prune(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), "2:4")
    taught = Taught(loader(), teacher)
    assert len(taught) == 4
    inputs, (target, answer) = next(iter(taught))
    assert teacher.training and target.shape == (16,)
    torch.testing.assert_close(answer, teacher.eval()(inputs).detach())  # as in evaluation: dropout is off
    teacher.train()

    def distance(model: nn.Module) -> float:
        return float(F.mse_loss(model(inputs), answer))

    result = twofour.finetune(
        student,
        taught,
        loss=distilled(F.cross_entropy, weight=0.9, kind="values"),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        epochs=4,
        evaluate=distance,
        progress=False,
    )
    assert result.sparse.evaluation < 0.7 * result.sparse.before  # type: ignore[operator]


@pytest.mark.parametrize("wrong", [{"weight": 1.5}, {"temperature": 0.0}, {"kind": "words"}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(TrainingError, match="distillation is impossible"):
        distilled(F.cross_entropy, **wrong)
