"""Models small enough to be written and read many times."""

from __future__ import annotations

import torch
from torch import nn

import twofour


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.fc = nn.Linear(256, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.fc(self.norm(self.conv(x)).flatten(1))))


def masked(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net().eval()
    twofour.prune(model, "2:4")
    return model


def quick(model: nn.Module) -> nn.Module:
    return twofour.compile(model, torch.randn(2, 16, 4, 4), tokens=(2,))
