"""No zeros: every value stays. Packed weights of low bits have it, whose dense form is smaller than floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.patterns.base import Conformity, Pattern, require_groups
from twofour.shapes import Bool, Real, Shaped


@dataclass(frozen=True)
class Dense(Pattern):
    """Every value of a weight is kept. It is no pattern to prune by: `parse` does not read it, headers do."""

    @property
    def name(self) -> str:
        """The text that headers of packed weights spell it by: "dense"."""
        return "dense"

    @property
    def group(self) -> int:
        """1: a reduction axis of any length is dense."""
        return 1

    @property
    def density(self) -> float:
        """Largest fraction of non-zero values: 1."""
        return 1.0

    def project(
        self, scores: Real[Tensor, "*rows reduction"], *, absolute: bool = False
    ) -> Bool[Tensor, "*rows reduction"]:
        """Keep everything; see `Pattern.project`."""
        require_groups(self, scores, "a tensor of scores")
        return torch.ones(scores.shape, dtype=torch.bool, device=scores.device)

    def check(self, weight: Shaped[Tensor, "*rows reduction"]) -> Conformity:
        """Count the values, all of which are legal; see `Pattern.check`."""
        require_groups(self, weight, "a weight")
        return Conformity(weight.numel(), weight.numel())


DENSE = Dense()
