"""Fashion-MNIST with a small ConvNet that is trained here, from three seeds."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from tasks.base import Batches, Metric, Task, accuracy
from twofour.demo.data import data_folder, read_idx


class Fashion(Task):
    """Three 3x3 convolutions with batch normalisation and a classifier; the first convolution stays dense."""

    name = "fashion"
    title = "Fashion-MNIST, a ConvNet of 32-64-64 channels"
    notes = (
        "20,000 training images; each training, the dense one, the control and the sparse one, has {epochs} "
        "epochs (SGD 0.1, momentum 0.9, weight decay 5e-4, batch 100, one cycle, flips). Stem and classifier stay"
        " dense (ASP's rule)."
    )
    pretrained = False
    epochs = 4

    @property
    def metric(self) -> Metric:
        """Top-1 accuracy."""
        return Metric("accuracy", "%", True, len(self.test[1]), "images")

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        """Images (20,000, 1, 28, 28) with mean 0 and deviation 1, and labels."""
        return self._read("train", 20_000)

    @cached_property
    def test(self) -> tuple[Tensor, Tensor]:
        """All 10,000 test images."""
        return self._read("t10k", 10_000)

    def _read(self, part: str, count: int) -> tuple[Tensor, Tensor]:
        folder = data_folder() / "fashion-mnist"
        images, labels = (read_idx(folder / f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
        pixels = torch.from_numpy(images[:count].copy()).float().unsqueeze(1)
        return (pixels - 72.94) / 90.02, torch.from_numpy(labels[:count].copy()).long()  # of the whole training set

    def network(self, seed: int) -> nn.Module:
        """Random weights."""
        torch.manual_seed(seed)
        stages = [(1, 32), (32, 64), (64, 64)]
        layers: list[nn.Module] = []
        for inputs, outputs in stages:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def loader(self, seed: int) -> Batches:
        """Batches of 100, flipped at random."""
        return Batches(len(self.train[1]), 100, self._batch)

    def _batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        images = self.train[0][index]
        return torch.where(torch.rand(len(index), 1, 1, 1) < 0.5, images.flip(3), images), self.train[1][index]

    def loss(self, output: Any, target: Any) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(output, target)

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """SGD with momentum."""
        return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)

    def evaluate(self, model: nn.Module) -> float:
        """Accuracy on the 10,000 test images."""
        return accuracy(model, *self.test)

    def calibration(self) -> list[Any]:
        """1,000 training images."""
        return list(self.train[0][:1000].split(100))

    def example(self) -> Tensor:
        """Two test images."""
        return self.test[0][:2]
