"""Pruned gradients: the same network trained with exact ones and with 2:4 ones, and which products ran sparse."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

import twofour

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32)
y = torch.tensor(digits.target)
start = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def trained(model: nn.Module, epochs: int = 6) -> float:
    """Train on 1400 digits and return the percentage of the others that are recognised."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for chosen in torch.randperm(1400, generator=generator).split(350):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    with torch.no_grad():
        return 100 * (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()


exact = trained(copy.deepcopy(start))
for mode in twofour.training.sdgp.MODES:
    model = copy.deepcopy(start)
    handle = twofour.training.sdgp.attach(model, "2:4", mode=mode, seconds=0.01)
    print(f"{mode:<10} {trained(model):.1f} % of the test digits, with exact gradients {exact:.1f} %")
    if mode == "rescaled":
        print(handle.plan)
    handle.remove()
