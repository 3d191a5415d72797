"""SR-STE: the mask follows the dense weight, and pruned values decay towards zero.

Zhou et al. 2021, "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch" (arXiv 2102.04010),
equation 9: the forward pass uses mask * w; the gradient that reaches w is that of mask * w, as it is, plus
decay * (1 - mask) * w, which keeps the mask from flickering.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twofour.errors import TrainingError
from twofour.layers import PrunableWeight
from twofour.patterns import Pattern
from twofour.recipe import Recipe
from twofour.training.schemes.base import Parametrised, Projection, assigned

DECAY = 2e-4
"""Zhou et al. 2021, section 5.1."""


def attach(
    model: nn.Module,
    pattern: str | Pattern | Mapping[str, str | Pattern] | Recipe = "2:4",
    *,
    decay: float = DECAY,
    skip: str | Sequence[str] = (),
    eligibility: str = "asp",
) -> Parametrised:
    """Train with SR-STE from now on; the optimiser's parameters stay the same objects.

    Args:
        model: A dense model.
        pattern: As in `twofour.prune`.
        decay: How strongly pruned values are pulled to zero; 0 is the plain straight-through estimator.
        skip: Globs of layers to leave dense.
        eligibility: As in `twofour.prune`.

    Returns:
        A scheme; `finish()` makes the model 2:4 for good.

    Example:
        >>> scheme = twofour.training.sr_ste.attach(model, "2:4")
        >>> ...  # your own training loop
        >>> model = scheme.finish()

    Raises:
        TrainingError: The model is masked already, nothing can be pruned, or `decay` is negative or infinite.
    """
    if not isinstance(decay, int | float) or not 0 <= decay < math.inf:
        raise TrainingError(
            "`decay` is impossible",
            got=repr(decay),
            wanted="a finite number of at least 0",
            remedy=f"leave it out to use {DECAY:g}, the authors' value",
        )
    found = assigned(model, pattern, skip, eligibility=eligibility)
    projections = {weight.name: (weight, _Decaying(weight, chosen, decay)) for weight, chosen in found}
    return Parametrised(model, "SR-STE", projections)


class _Decaying(Projection):
    def __init__(self, prunable: PrunableWeight, pattern: Pattern, decay: float) -> None:
        super().__init__(prunable, pattern)
        self.decay = decay

    def forward(self, weight: Tensor) -> Tensor:
        """Dense weight -> masked weight."""
        return _StraightThrough.apply(weight, self.keep(weight), self.decay)  # pyright: ignore[reportReturnType]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, keep: Tensor, decay: float) -> Tensor:
        ctx.save_for_backward(weight, keep)
        ctx.decay = decay
        return weight * keep

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        weight, keep = ctx.saved_tensors
        return gradients[0] + ctx.decay * pruned_values(weight, keep), None, None


def pruned_values(weight: Tensor, keep: Tensor) -> Tensor:
    """Return (1 - mask) * w of equation 9: what is added, times the decay, to the gradient."""
    return weight.masked_fill(keep, 0)
