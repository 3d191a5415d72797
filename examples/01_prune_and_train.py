"""Prune a trained network to 2:4 and train it on with your own loop: it stays 2:4 after every step."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import twofour

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32)
y = torch.tensor(digits.target)
x_train, y_train, x_test, y_test = x[:1400], y[:1400], x[1400:], y[1400:]

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def train(epochs: int) -> None:
    """Train on all batches of 100; nothing here knows of sparsity."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for _ in range(epochs):
        for batch in torch.randperm(len(x_train)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x_train[batch]), y_train[batch]).backward()
            optimizer.step()


def accuracy() -> float:
    """Return the percentage of test digits that are recognised."""
    with torch.no_grad():
        return 100 * (model(x_test).argmax(1) == y_test).float().mean().item()


train(epochs=10)
print(f"dense             {accuracy():.1f} %")
twofour.prune(model, "2:4")
print(f"2:4, one-shot     {accuracy():.1f} %")
train(epochs=10)
print(f"2:4, trained on   {accuracy():.1f} %")

report = twofour.check(model)
print(report)
assert report.ok
