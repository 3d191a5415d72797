"""Low bits: digits in one-bit weights and two-bit inputs, beside floats; the integer answer is the model's own."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import twofour
from twofour import quantization

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
y = torch.tensor(digits.target)
net = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
)


def train(model: nn.Module, epochs: int = 5) -> None:
    """Train on 1400 digits."""
    optimizer = torch.optim.Adam(model.train().parameters(), lr=2e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(1400).split(100):
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    model.eval()


def score(model: nn.Module) -> float:
    """Return the percentage of the other digits that are recognised."""
    with torch.no_grad():
        return 100 * (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()


train(net)
print(f"float      {score(net):.1f} % of the test digits")
for weights, activations in (("w1", "a1"), ("w1", "a2"), ("w2", "a2"), ("w4", "a4")):
    low = twofour.quantize(copy.deepcopy(net), weights, activations, data=[x[:200]])
    before = score(low)
    train(low)
    with quantization.in_whole_numbers(low):
        whole = low(x[1400:])
    assert torch.equal(whole, low(x[1400:]))
    print(
        f"{weights}{activations}       {score(low):.1f} %, {before:.1f} % before training; whole numbers say the same"
    )
