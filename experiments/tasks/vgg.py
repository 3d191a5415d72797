"""CIFAR-10 with a net of plain convolutions as VGG stacks them, on few images, to be made smaller."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from tasks.base import Batches
from tasks.cifar10 import Cifar10

IMAGES = 10_000
WIDTHS = (32, 64, 0, 96, 96, 0, 192, 192)
"""Of the convolutions; 0 is a pooling."""


class ShrinkCifar10(Cifar10):
    """Six convolutions of 3x3, 32 to 192 channels, on 16x16 to 4x4 places."""

    name = "shrink-cifar10"
    title = "CIFAR-10, six convolutions of 32 to 192 channels"
    notes = (
        "The first 10,000 training images. Every net is trained {epochs} epochs and 2 more (SGD 0.1, momentum 0.9, "
        "weight decay 5e-4, batch 100, one cycle over both, flips, shifts by 4); what is cut is cut between. Gates "
        "are pulled during three fifths of the first epochs. In the last ones the dense net at its end teaches all "
        "others (`training.distilled`); dense, taught keeps all channels."
    )
    pretrained = False
    border, rewound = "mean", False
    epochs, after = 6, 2
    strengths = (1.3, 2.0)
    share = 0.6
    restarts = False
    taught = True

    @cached_property
    def train(self) -> tuple[Tensor, Tensor]:
        """The first 10,000 images, normalised, and labels."""
        images, labels = super().train
        return images[:IMAGES].clone(), labels[:IMAGES].clone()

    def network(self, seed: int) -> nn.Module:
        """Random weights."""
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        inputs = 3
        for width in WIDTHS:
            if not width:
                layers.append(nn.MaxPool2d(2))
                continue
            stride = 2 if inputs == 3 else 1
            convolution = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))
        return net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def loader(self, seed: int) -> Batches:
        """Augmented batches of 100."""
        return Batches(len(self.train[1]), 100, self._batch)

    def optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """SGD with momentum."""
        return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)
