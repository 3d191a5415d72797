"""CIFAR-10 with the ResNet-9-like net of the SDGP authors, narrower and shorter, trained from scratch."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from tasks.base import Batches
from tasks.cifar10 import Cifar10

IMAGES, WIDTH, CUTOUT = 10_000, 8, 4


class ResNet9(nn.Module):
    """Eight convolutions, seven of them prunable: w, 2w, residual, 4w, residual, 2w, global maximum.

    Source: KakaoBrain's AutoCLINT network, as in McDanel et al. 2022 (arXiv 2202.00774), where w is 128; the scores are
    multiplied by 0.2.

    Args:
        width: w.
        classes: Number of scores.
    """

    def __init__(self, width: int = WIDTH, classes: int = 10) -> None:
        super().__init__()
        self.stem = _convolution(3, width, 3, 1, 1)
        self.wide = _convolution(width, 2 * width, 5, 2, 2)
        self.residual1 = nn.Sequential(*(_convolution(2 * width, 2 * width, 3, 1, 1) for _ in range(2)))
        self.wider = _convolution(2 * width, 4 * width, 3, 1, 1)
        self.residual2 = nn.Sequential(*(_convolution(4 * width, 4 * width, 3, 1, 1) for _ in range(2)))
        self.narrow = _convolution(4 * width, 2 * width, 3, 1, 0)
        self.head = nn.Linear(2 * width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images (n, 3, 32, 32) -> scores (n, classes)."""
        x = self.wide(self.stem(x))
        x = F.max_pool2d(self.wider(x + self.residual1(x)), 2)
        x = self.narrow(x + self.residual2(x))
        return 0.2 * self.head(x.amax((2, 3)))


def _convolution(inputs: int, outputs: int, size: int, stride: int, padding: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class GradientsCifar10(Cifar10):
    """The authors' training, shortened: flip, shift by 2, cutout of 4, label smoothing 0.1, no decay on BatchNorm."""

    name = "gradients-cifar10"
    title = "Pruned gradients (SDGP): CIFAR-10, ResNet-9-like net of a sixteenth of the width, from scratch"
    notes = (
        "10,000 training images, {epochs} epochs (SGD 0.2, momentum 0.9, weight decay 5e-4 but not on BatchNorm, batch "
        "128, one cycle, label smoothing 0.1, flip, shift by 2, cutout of 4, float32, no averaging over flips); the "
        "authors: 50,000 images, sixteen times the width, 150 epochs, float16."
    )
    pretrained = False
    epochs = 30
    padding = 2
    border, rewound = "mean", False

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        """The first 10,000 images, normalised, and labels."""
        images, labels = super().train
        return images[:IMAGES].clone(), labels[:IMAGES].clone()

    def network(self, seed: int) -> nn.Module:
        """Random weights."""
        torch.manual_seed(seed)
        return ResNet9().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def loader(self, seed: int) -> Batches:
        """Augmented batches of 128."""
        return Batches(len(self.train[1]), 128, self._cut_out)

    def _cut_out(self, index: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = self._batch(index)
        inside = [
            (places >= start) & (places < start + CUTOUT)
            for places in [torch.arange(32)]
            for start in torch.randint(0, 33 - CUTOUT, (2, len(index), 1))
        ]
        hole = inside[0][:, None, :, None] & inside[1][:, None, None, :]
        return images.masked_fill(hole, 0.0), labels

    def loss(self, output: Any, target: Any) -> Tensor:
        """Cross entropy with smoothed labels."""
        return F.cross_entropy(output, target, label_smoothing=0.1)

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """SGD with momentum; vectors (BatchNorm) without decay."""
        groups = [
            {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": 5e-4},
            {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
        ]
        return SGD(groups, lr=0.2, momentum=0.9)


class GradientsCifar10Short(GradientsCifar10):
    """A fifth of the epochs: whether pruned gradients lie further behind when a training is short."""

    name = "gradients-cifar10-short"
    title = "Pruned gradients (SDGP): the same training in 6 epochs"
    epochs = 6
