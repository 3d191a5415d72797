"""How far a product may lie from the one in float64, by how its kernel reads activations."""

import torch
from torch import Tensor

from twofour.kernels import Kernel

FIXED_POINT = ("avx512_vnni", "avx512_vbmi", "avx_vnni", "amx")
"""Instruction sets whose int4 rows round activations to 16 bits, one scale a token."""


def in_fixed_point(row: Kernel) -> bool:
    """Whether an int4 row rounds activations to 16 bits: all of those instruction sets, and panels of every other."""
    return row.isa in FIXED_POINT or "int4_panels" in row.name


def int4_bound(x: Tensor, weight: Tensor, fixed: bool) -> Tensor:
    """Return the error allowed to x @ weight.T in an int4 row, by what inputs are: (tokens, out), or (tokens, 1).

    Float rows: 4 eps K^0.5 |x||w|. Fixed point: half a step of a token's largest value on each input besides.
    """
    x, weight = x.double(), weight.double()
    epsilon = torch.finfo(torch.float32).eps
    bound = 4 * epsilon * x.shape[-1] ** 0.5 * x.norm(dim=1, keepdim=True) * weight.norm() + epsilon
    if not fixed:
        return bound
    step = x.abs().amax(1, keepdim=True) / (127 * 256 + 127)
    return bound + step / 2 * weight.abs().sum(1)
