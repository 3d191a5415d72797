"""Squeeze-and-excite in plain torch: what every row of the table has to compute."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from twofour.kernels.epilogue import ACTIVATIONS
from twofour.shapes import Float

GATES = {"sigmoid": torch.sigmoid, "hardsigmoid": functional.hardsigmoid}
"""Name -> the function in torch, in the order of `Gate` in squeeze_excite.h."""


def reference(
    x: Float[Tensor, "images channels height width"],
    reduce: Float[Tensor, "squeezed channels"],
    reduce_bias: Float[Tensor, " squeezed"] | None,
    expand: Float[Tensor, "squeezed channels"],
    expand_bias: Float[Tensor, " channels"] | None,
    activation: str = "silu",
    gate: str = "sigmoid",
) -> Float[Tensor, "images channels height width"]:
    """Return every channel of x times its scale; arguments as in `squeeze_excite`, any floating dtype."""
    squeezed = ACTIVATIONS[activation](functional.linear(x.mean((2, 3)), reduce, reduce_bias))
    scale = GATES[gate](functional.linear(squeezed, expand.T, expand_bias))
    return x * scale[:, :, None, None]
