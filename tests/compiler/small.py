"""A small model and a quick way to compile it, for the tests of this folder."""

import torch
from torch import Tensor, nn

import twofour

TOKENS = (1, 32)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False), nn.Linear(64, 10))


class Branching(nn.Module):
    """A model whose forward asks for a value: it cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


def quick(model: nn.Module, example: object = None, **options: object) -> nn.Module:
    return twofour.compile(model, example, tokens=TOKENS, **options)  # type: ignore[arg-type]
