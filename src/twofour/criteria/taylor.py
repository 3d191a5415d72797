"""First-order Taylor: what the loss would change by, to first order, if a weight were zero."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from twofour.calibration import Need, Statistics
from twofour.criteria.base import Scored


@dataclass(frozen=True)
class Taylor(Scored):
    """Rank by the root mean square over the batches of w * dL/dw (Molchanov et al. 2019, eq. 8).

    With a single batch that is |w * dL/dw|. Squares, because the signed gradients of a trained model cancel.
    """

    @property
    def kind(self) -> str:
        """The criterion's name: "taylor"."""
        return "taylor"

    @property
    def need(self) -> Need | None:
        """Gradients of the loss."""
        return "gradients"

    @property
    def absolute(self) -> bool:
        """True: the sign says nothing."""
        return True

    def score(self, weight: Tensor, statistics: Statistics | None = None, name: str = "") -> Tensor:
        """Return w times the root mean square of its gradient, in float32."""
        assert statistics is not None and statistics.gradient is not None, "asked for by `need`"
        return weight.detach().to(statistics.gradient.dtype) * statistics.gradient
