"""Magnitude: the largest |w| of each group stay (Mishra et al. 2021, section 4; ASP's m4n2_1d)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from twofour.criteria.base import Criterion


@dataclass(frozen=True)
class Magnitude(Criterion):
    """Rank by |w|. The two largest of four have the largest sum of |w| among the six 2:4 choices."""

    @property
    def name(self) -> str:
        """The criterion's text: "magnitude"."""
        return "magnitude"

    @property
    def absolute(self) -> bool:
        """True: the projection ranks by |score|, which spares a copy of the weight."""
        return True

    def score(self, weight: Tensor) -> Tensor:
        """Return the weight itself; the projection takes its absolute value."""
        return weight.detach()
