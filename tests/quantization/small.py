"""Small networks to be run in low bits, widths by name, and how far two answers are apart."""

import torch
from torch import nn

from twofour.quantization import Widths
from twofour.quantization.widths import encoding_of


def widths(weights: str, activations: str | None) -> Widths:
    held = encoding_of(weights, "weights")
    assert held is not None
    return Widths(held, encoding_of(activations, "activations"))


def convnet(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, padding=1, stride=2, groups=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10)),
    ).eval()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4)).eval()


def error_of(model: nn.Module, other: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return ((model(x) - other(x)).norm() / other(x).norm()).item()
