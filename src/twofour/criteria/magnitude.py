"""Magnitude: the largest |w| of each group stay (Mishra et al. 2021, section 4; ASP's m4n2_1d)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from twofour.calibration import Statistics
from twofour.criteria.base import Scored


@dataclass(frozen=True)
class Magnitude(Scored):
    """Rank by |w|. The two largest of four have the largest sum of |w| among the six 2:4 choices."""

    kind = "magnitude"
    absolute = True  # the projection ranks by |score|, which spares a copy of the weight

    def score(self, weight: Tensor, statistics: Statistics | None = None, name: str = "") -> Tensor:
        """Return the weight itself; the projection takes its absolute value."""
        return weight.detach()
