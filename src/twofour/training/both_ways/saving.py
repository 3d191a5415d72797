"""What a measured step would save at another size: a model, with its assumptions said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twofour.errors import TrainingError

PRODUCTS = ("forward", "data gradient", "weight gradient")
FIXED = ("optimizer",)


@dataclass(frozen=True)
class Saving:
    """A prediction.

    Attributes:
        dense: Seconds of a dense step.
        sparse: Seconds of a sparse step.
    """

    dense: float
    sparse: float

    @property
    def ratio(self) -> float:
        """Dense time over sparse time."""
        return self.dense / self.sparse


def saving(
    dense: Mapping[str, float],
    sparse: Mapping[str, float],
    *,
    width: float = 1.0,
    tokens: float = 1.0,
) -> Saving:
    """Predict the step of a model `width` times as wide on `tokens` times as many tokens, from two measured steps.

    Each part is scaled by how its work grows, at the speed that was measured:

    * products ("forward", "data gradient", "weight gradient") with width^2 * tokens;
    * "pack" with the larger of width^2 (weights, packed once a step) and width * tokens (estimates of gradients);
    * "optimizer" with width^2;
    * every other part (attention at a fixed sequence length, norms, activations, losses) with width * tokens.

    Assumptions: kernels keep their measured ratio at larger sizes (they lose some when weights leave the caches, and
    memory bandwidth is not modelled); attention's share does not grow with the sequence; depth scales every part alike
    and cancels; several threads or machines scale both steps alike (communication would add the same to both).

    Args:
        dense: Seconds of each part of the dense step.
        sparse: The same of the sparse step.
        width: Factor on the model's width.
        tokens: Factor on the tokens of a step.

    Raises:
        TrainingError: A factor or a time is not positive.
    """
    if not (width > 0 and tokens > 0 and min(*dense.values(), *sparse.values()) >= 0 and sum(sparse.values()) > 0):
        raise TrainingError(
            "the saving cannot be predicted",
            got=f"width={width}, tokens={tokens}, parts {sorted({*dense, *sparse})}",
            wanted="positive factors and times that are not negative",
            remedy="pass the parts that a profile measured",
        )

    def scaled(parts: Mapping[str, float]) -> float:
        return sum(seconds * _growth(name, width, tokens) for name, seconds in parts.items())

    return Saving(scaled(dense), scaled(sparse))


def _growth(part: str, width: float, tokens: float) -> float:
    if part in PRODUCTS:
        return width * width * tokens
    if part == "pack":
        return max(width * width, width * tokens)
    return width * width if part in FIXED else width * tokens
