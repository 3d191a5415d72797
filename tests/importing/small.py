"""Sparse weights and small models for the importers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from twofour.patterns import parse

DATA = Path(__file__).parent.parent / "data" / "importing"


def sparse(rows: int, columns: int, dtype: torch.dtype = torch.float32, pattern: tuple[int, int] = (2, 4)) -> Tensor:
    """Random N:M weight, -0.0 where it was pruned from a negative value; some groups keep fewer than N values."""
    n, m = pattern
    weight = torch.randint(-128, 128, (rows, columns)) if dtype == torch.int8 else torch.randn(rows, columns)
    kept = weight.reshape(-1, m).abs().argsort(-1)[:, m - n :]
    keep = torch.zeros(weight.numel() // m, m, dtype=weight.dtype).scatter_(1, kept, 1)
    keep[::7] = 0
    keep[3::5, : m // 2] = 0
    return (weight * keep.view_as(weight)).to(dtype)


def bitmask_parts(weight: Tensor) -> dict[str, Tensor]:
    """The three tensors that compressed-tensors stores of a 2:4 weight (out, in), in a multiple of 8."""
    keep = parse("2:4").project(weight, absolute=True)
    bits = keep.view(len(weight), -1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)
    return {
        "compressed": weight[keep].view(len(weight), -1),
        "bitmask": bits.sum(-1, dtype=torch.uint8),
        "shape": torch.tensor(weight.shape).view(-1, 1),
    }


class Net(nn.Module):
    """A convolution and two Linears that are sparse in `state`, and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.fc1, self.fc2, self.head = nn.Linear(256, 64), nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc2(torch.relu(self.fc1(torch.relu(self.conv(x)).flatten(1))))))


def net_state(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """State dict of a `Net` whose conv, fc1 and fc2 are 2:4."""
    torch.manual_seed(3)
    state = dict(Net().to(dtype).state_dict())
    state["conv.weight"] = sparse(16 * 9, 16, dtype).view(16, 3, 3, 16).movedim(-1, 1).contiguous()
    state["fc1.weight"], state["fc2.weight"] = sparse(64, 256, dtype), sparse(128, 64, dtype)
    return state


INPUT = torch.linspace(-1, 1, 2 * 16 * 16).view(2, 16, 4, 4)
"""An example for `Net`."""
