"""A small model and a quick way to compile it, for the tests of this folder."""

import torch
from torch import nn

import twofour

TOKENS = (1, 32)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False), nn.Linear(64, 10))


def quick(model: nn.Module, example: object = None, **options: object) -> nn.Module:
    return twofour.compile(model, example, tokens=TOKENS, **options)  # type: ignore[arg-type]
