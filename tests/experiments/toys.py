"""A task of toy data."""

import torch
from torch import nn


def toy(pretrained: bool = False):
    from tasks.base import Batches, Metric, Task, accuracy

    class Toy(Task):
        name, title, notes, epochs = "toy", "Toy data", "Nothing but {epochs} epochs.", 2

        def __init__(self) -> None:
            self.pretrained = pretrained
            generator = torch.Generator().manual_seed(0)
            self.x = torch.randn(256, 32, generator=generator)
            self.y = (self.x[:, :4].sum(1) > 0).long()

        @property
        def metric(self):
            return Metric("accuracy", "%", True, len(self.y), "points")

        def network(self, seed):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

        def loader(self, seed):
            return Batches(256, 32, lambda index: (self.x[index], self.y[index]))

        def loss(self, output, target):
            return nn.functional.cross_entropy(output, target)

        def optimizer(self, parameters):
            return torch.optim.Adam(parameters, lr=0.01)

        def evaluate(self, model):
            return accuracy(model, self.x, self.y)

        def calibration(self):
            return [self.x[:64]]

        def example(self):
            return self.x[:2]

    return Toy()
