"""First steps of weights and inputs: those of the least squared error among candidates, good without any training.

Gradient-free and by search, as in "Low-bit Quantization of Neural Networks for Efficient Inference" (Choukroun et al.
2019, arXiv 1902.06822, section 3); Esser et al. 2020 start from 2 mean |w| / sqrt(q) and train at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twofour.packing.encodings import Bits
from twofour.quantization.carried import TINY

CANDIDATES = 40
"""Shares of the full range that are tried: 1/40 to 1."""


def weight_steps(runs: Tensor, encoding: Bits) -> Tensor:
    """Return the step of each run of weights of the least squared error, float32 (runs,).

    Args:
        runs: Float (runs, n): what shares a step.
        encoding: Two's complement of two bits or more, or bipolar.
    """
    rows = runs.detach().float()
    full = (rows.abs().amax(1, keepdim=True) / encoding.bounds[1]).clamp(min=TINY)
    best, least = full.clone(), torch.full_like(full, torch.inf)
    for share in range(1, CANDIDATES + 1):
        step = (full * (share / CANDIDATES)).clamp(min=TINY)
        error = (encoding.nearest(rows / step) * step - rows).square().sum(1, keepdim=True)
        best, least = torch.where(error < least, step, best), torch.minimum(error, least)
    return best.flatten()


def input_step(sample: Tensor, low: float, high: float, encoding: Bits) -> tuple[float, int]:
    """Return the step and the zero point of inputs of the least squared error.

    Args:
        sample: Inputs, float32 of one axis.
        low: Their least value, or zero.
        high: Their greatest value, or zero.
        encoding: Unsigned, two's complement or bipolar.
    """
    least, most = encoding.bounds
    unsigned = encoding.levels == "unsigned"
    full = (high - low) / encoding.largest_code if unsigned else max(-low, high) / most
    best, error = (max(full, TINY), 0), float("inf")
    for share in range(1, CANDIDATES + 1):
        step = max(full * share / CANDIDATES, TINY)
        zero = min(round(-low / step), most) if unsigned and low < 0 else 0
        levels = encoding.nearest(sample / step) if encoding.levels == "bipolar" else (sample / step).round()
        found = (levels.clamp(least - zero, most - zero) * step - sample).square().mean().item()
        best, error = ((step, zero), found) if found < error else (best, error)
    return best


def width_of(module: nn.Module) -> int:
    """Return how many products one sum of a layer has."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight[0].numel()
