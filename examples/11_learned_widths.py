"""Learned proportions: gates close channels while a net of digits trains; the small net goes on from there."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from twofour.training import gates

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
y = torch.tensor(digits.target)
net = nn.Sequential(
    *(nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
    *(nn.Conv2d(64, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
)


def train(model: nn.Module, epochs: int, scheme: gates.Gates | None = None) -> None:
    """Train on 1400 digits."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for chosen in torch.randperm(1400).split(100):
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            if scheme is not None:
                scheme.step()
    model.eval()


def score(model: nn.Module) -> float:
    """Return the percentage of the other digits that are recognised."""
    with torch.no_grad():
        return 100 * (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()


learning = gates.attach(net, x[:8], steps=8 * 14, strength=2.0)
train(net, 8, learning)
learning.finish()
for name, (before, after) in gates.learned(net).widths.items():
    print(f"{name}: {before} -> {after}")
small = gates.cut(net, x[:8])
train(small, 4)
sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (net, small)]
print(f"{sizes[0]:,} -> {sizes[1]:,} parameters, {score(small):.1f} % of the test digits")
