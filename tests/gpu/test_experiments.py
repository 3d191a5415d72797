"""Rows of the results page that are made on a GPU."""

from pathlib import Path

import pytest
import torch
from torch import nn

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"


@pytest.mark.parametrize("criterion", ["", "magnitude", "admm", "auto", "default"])
def test_a_row_is_made_where_the_task_says(criterion, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    monkeypatch.chdir(tmp_path)
    import run
    from arms import CONTROL, Arm
    from tasks.base import Batches, Metric, Task, accuracy

    class Toy(Task):
        name, title, notes, epochs, pretrained = "toy", "Toy data", "Nothing.", 2, True
        device = torch.device("cuda")
        x = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
        y = (x[:, :4].sum(1) > 0).long()
        metric = Metric("accuracy", "%", True, 512, "points")  # pyright: ignore[reportAssignmentType]

        def network(self, seed):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

        def loader(self, seed):
            return Batches(512, 32, lambda index: (self.x[index], self.y[index]))

        def loss(self, output, target):
            assert output.is_cuda and target.is_cuda
            return nn.functional.cross_entropy(output, target)

        def optimizer(self, parameters):
            return torch.optim.Adam(parameters, lr=0.01)

        def evaluate(self, model):
            assert next(model.parameters()).is_cuda
            return accuracy(model, self.x, self.y)

        def calibration(self):
            return [self.x[:64], self.x[64:128]]

        def example(self):
            return self.x[:2]

    arm = Arm("2:4", criterion, again=True) if criterion else CONTROL
    row = run.measured(Toy(), arm, 0)
    assert row.gpu == torch.cuda.get_device_name()
    assert row.value > 80 and row.value > row.one_shot - 5
    assert row.pruning is None and row.memory is None
