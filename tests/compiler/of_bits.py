"""A small model of low bits, the answer of its whole numbers, and which of its layers run on kernels."""

from typing import Any

import torch
from torch import nn

import twofour
from twofour import quantization


def of_bits(weights: str, inputs: str, *, data: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(71, 33), nn.ReLU(), nn.Linear(33, 5, bias=False)).eval().to(dtype)
    given: Any = [torch.randn(40, 71).to(dtype)] if data else None
    return twofour.quantize(model, weights, inputs, data=given, ends=None)


def whole(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with quantization.in_whole_numbers(model):
        return model(x)


def run(model: nn.Module) -> list[bool]:
    return [held.runs is not None for held in quantization.of(model).values()]
