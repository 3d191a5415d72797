"""First-order Taylor: what the loss would change by, to first order, if a weight were zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.calibration import Statistics
from twofour.criteria.base import Scored

LEAST = 1e-24
"""Scores that are smaller rank as zero: room in float32 for the magnitudes below them."""


@dataclass(frozen=True)
class Taylor(Scored):
    """Rank by the root mean square over the batches of w * dL/dw (Molchanov et al. 2019, eq. 8).

    With a single batch that is |w * dL/dw|. Squares, because the signed gradients of a trained model cancel. Values
    without a gradient, as of units that no sample wakes, come after all others, among themselves by magnitude.
    """

    kind = "taylor"
    need = "gradients"
    absolute = True  # the sign says nothing

    def score(self, weight: Tensor, statistics: Statistics | None = None, name: str = "") -> Tensor:
        """Return |w| times the root mean square of its gradient, in float32."""
        assert statistics is not None and statistics.gradient is not None, "asked for by `need`"
        size = weight.detach().to(statistics.gradient.dtype).abs()
        scores = size * statistics.gradient
        live = ~(scores <= LEAST)  # NaN stays, to be refused
        # A millionth of the least score: patterns that sum over rows must not see a sum of these as one of those.
        least = scores[live].min() / 1e6 if live.any() else 1.0
        return torch.where(live, scores, least * size / size.max().clamp_min(LEAST))
