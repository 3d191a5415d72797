"""S-STE: a continuous projection instead of a mask that jumps.

Hu et al. 2024, "S-STE: Continuous Pruning Function for Efficient 2:4 Sparse Pre-training" (arXiv 2409.09099): in every
group the (N+1)-th largest magnitude is subtracted from all magnitudes and what falls below zero is zero, so that a
value that enters or leaves the mask does so at zero. A scale per weight, fixed at the start, makes up for the
shrinking: the least-squares fit of the projected weight to the dense one. The gradient passes straight through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from twofour.layers import PrunableWeight
from twofour.patterns import NM, Pattern
from twofour.recipe import Recipe
from twofour.training.schemes.base import Parametrised, Projection, assigned, require_nm


def attach(
    model: nn.Module,
    pattern: str | Pattern | Mapping[str, str | Pattern] | Recipe = "2:4",
    *,
    skip: str | Sequence[str] = (),
    eligibility: str = "asp",
) -> Parametrised:
    """Train with S-STE from now on; the optimiser's parameters stay the same objects.

    Args:
        model: A dense model, trained or fresh: the scale is that of the weights it has now.
        pattern: N:M patterns.
        skip: Globs of layers to leave dense.
        eligibility: As in `twofour.prune`.

    Raises:
        TrainingError: The model is masked already, nothing can be pruned, or a pattern is not N:M.
    """
    found = assigned(model, pattern, skip, eligibility=eligibility)
    for weight, chosen in found:
        require_nm(chosen, "S-STE", weight.name)
    projections = {weight.name: (weight, _Shrinking(weight, chosen)) for weight, chosen in found}
    return Parametrised(model, "S-STE", projections)


class _Shrinking(Projection):
    scale: Tensor

    def __init__(self, prunable: PrunableWeight, pattern: Pattern) -> None:
        super().__init__(prunable, pattern)
        with torch.no_grad():
            # float16 ends at 65504, which the sum of squares of a large weight may pass.
            weight = prunable.parameter.to(torch.promote_types(prunable.parameter.dtype, torch.float32))
            shrunk = self.shrink(weight)
            scale = (weight * shrunk).sum() / shrunk.square().sum().clamp(min=torch.finfo(weight.dtype).tiny)
        self.register_buffer("scale", scale, persistent=False)

    def shrink(self, weight: Tensor) -> Tensor:
        """The soft threshold, group by group."""
        assert isinstance(self.pattern, NM)
        n, m = self.pattern.n, self.pattern.m
        groups = self.reduction_last(weight).unflatten(-1, (-1, m))
        threshold = groups.abs().topk(n + 1, dim=-1).values[..., -1:]
        return self.from_reduction_last((groups.sign() * (groups.abs() - threshold).clamp(min=0)).flatten(-2))

    def forward(self, weight: Tensor) -> Tensor:
        """Dense weight -> sparse weight, with the gradient of the identity."""
        projected = (self.scale * self.shrink(weight.detach())).to(weight.dtype)
        return projected + (weight - weight.detach())
