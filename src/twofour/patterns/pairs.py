"""Pair-wise N:M, the form that 4-bit types take on Sparse Tensor Cores.

In every 8 values, seen as 4 aligned pairs, exactly 2 pairs are kept whole (PTX ISA, "Sparse matrix storage", for
.u4, .s4 and fp4): half of the values, with one 2-bit index for each kept pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.patterns.base import Conformity, Pattern, require_groups
from twofour.patterns.groups import check_groups, project_reference, require_possible
from twofour.patterns.nm import NM
from twofour.shapes import Bool, Real, Shaped


@dataclass(frozen=True)
class PairedNM(Pattern):
    """At most `n` / 2 non-zero pairs in every `m` / 2 aligned pairs.

    `n` and `m` count values and are even, 2 <= n < m <= 64; a PatternError says so otherwise.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        require_possible(self.name, self.n, self.m, unit=2)

    @property
    def name(self) -> str:
        """The pattern's text, for example "4:8-pairs"."""
        return f"{self.n}:{self.m}-pairs"

    @property
    def group(self) -> int:
        """Values per group: m."""
        return self.m

    @property
    def density(self) -> float:
        """Largest fraction of values that may be non-zero: n / m."""
        return self.n / self.m

    def within(self, other: Pattern) -> bool:
        """Tell whether this pair-wise N:M, which is N:M too, implies another; see `Pattern.within`."""
        return super().within(other) or NM(self.n, self.m).within(other)

    def project(
        self, scores: Real[Tensor, "*rows reduction"], *, absolute: bool = False
    ) -> Bool[Tensor, "*rows reduction"]:
        """Keep the pairs with the largest sum of scores; see `Pattern.project`."""
        require_groups(self, scores, "a tensor of scores")
        ranked = scores.detach().to(torch.float64 if scores.dtype == torch.float64 else torch.float32)
        pairs = torch.unflatten(ranked.abs() if absolute else ranked, -1, (-1, 2)).sum(-1)
        return project_reference(pairs, self.n // 2, self.m // 2).repeat_interleave(2, dim=-1)

    def check(self, weight: Shaped[Tensor, "*rows reduction"]) -> Conformity:
        """Count the groups with at most `n` / 2 pairs that are not zero; see `Pattern.check`."""
        require_groups(self, weight, "a weight")
        pairs = (torch.unflatten(weight.detach(), -1, (-1, 2)) != 0).any(-1)
        return check_groups(torch.unflatten(pairs, -1, (-1, self.m // 2)), self.n // 2, weight, self.m)
