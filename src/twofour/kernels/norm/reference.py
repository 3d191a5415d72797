"""LayerNorm and RMSNorm in plain torch: what every row of the table has to compute."""

from __future__ import annotations

from torch import Tensor

from twofour.shapes import Float


def reference(
    x: Float[Tensor, "*tokens channels"],
    weight: Float[Tensor, " channels"] | None,
    bias: Float[Tensor, " channels"] | None,
    eps: float,
    centred: bool = True,
) -> Float[Tensor, "*tokens channels"]:
    """Return the rows of x normalised; arguments as in `norm`, any floating dtype."""
    shifted = x - x.mean(-1, keepdim=True) if centred else x
    y = shifted * (shifted.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
