"""Fashion-MNIST with a residual net whose blocks are four times as wide inside as outside, to be made smaller."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tasks.fashion import Fashion


class Block(nn.Module):
    """x + two 3x3 convolutions with `hidden` channels between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, hidden, 3, padding=1, bias=False), nn.BatchNorm2d(hidden)
        self.conv2, self.bn2 = nn.Conv2d(hidden, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width, h, w) -> the same."""
        return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


class ShrinkFashion(Fashion):
    """Two stages of two blocks, 16 channels with 64 inside and 32 with 128 inside, on 7x7 and 4x4 places."""

    name = "shrink-fashion"
    title = "Fashion-MNIST, a residual ConvNet of 16-32 channels with 64-128 inside its blocks"
    notes = (
        "20,000 training images. Every net is trained in two halves of {epochs} epochs each (SGD 0.1, momentum 0.9, "
        "weight decay 5e-4, batch 100, one cycle a half, flips); what is cut is cut between the halves."
    )
    epochs = after = 2

    def network(self, seed: int) -> nn.Module:
        """Random weights."""
        torch.manual_seed(seed)

        def convolved(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
            return nn.Conv2d(inputs, outputs, 3, 2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()

        return nn.Sequential(
            *(*convolved(1, 16), nn.MaxPool2d(2), Block(16, 64), Block(16, 64)),
            *(*convolved(16, 32), Block(32, 128), Block(32, 128)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        )
