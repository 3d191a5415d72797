"""Magnitude: the largest |w| of each group stay (Mishra et al. 2021, section 4; ASP's m4n2_1d)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from twofour.calibration import Need, Statistics
from twofour.criteria.base import Scored


@dataclass(frozen=True)
class Magnitude(Scored):
    """Rank by |w|. The two largest of four have the largest sum of |w| among the six 2:4 choices."""

    @property
    def kind(self) -> str:
        """The criterion's name: "magnitude"."""
        return "magnitude"

    @property
    def need(self) -> Need | None:
        """None: the weight is enough."""
        return None

    @property
    def absolute(self) -> bool:
        """True: the projection ranks by |score|, which spares a copy of the weight."""
        return True

    def score(self, weight: Tensor, statistics: Statistics | None = None, name: str = "") -> Tensor:
        """Return the weight itself; the projection takes its absolute value."""
        return weight.detach()
