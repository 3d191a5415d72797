"""Importance of every value of the dense model, for searches that come before the pruning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from twofour import calibration
from twofour.calibration import Statistics
from twofour.criteria.activation import Wanda
from twofour.criteria.base import Criterion, Scored
from twofour.layers import PrunableWeight
from twofour.progress import Progress


def importance(
    model: nn.Module,
    weights: Sequence[PrunableWeight],
    criterion: Criterion,
    *,
    data: Any,
    samples: int,
    display: Progress | None = None,
) -> dict[str, Tensor]:
    """Return scores of the dense weights by name, of each weight's own shape, not negative; nothing is changed.

    Criteria that rank by the norms of the inputs give their own scores; those that want a Hessian are stood in for by
    Wanda's |W_ij| ||X_j||_2, to whose square SparseGPT's score comes down where inputs do not correlate. For the others
    the answer is empty, as for weights that the data do not reach: there the magnitude stands.

    Args:
        model: The dense model.
        weights: The weights to score.
        criterion: How they will be pruned.
        data: Calibration data that can be walked again, or None.
        samples: How many samples of them are used.
        display: Shows progress.

    Raises:
        DataError: The data cannot be used, or the model does not run on them.
    """
    if data is None or criterion.need not in ("norms", "hessian"):
        return {}
    scored = criterion if isinstance(criterion, Scored) and criterion.need == "norms" else Wanda()
    found: dict[str, Tensor] = {}

    def visit(weight: PrunableWeight, statistics: Statistics) -> None:
        values = calibration.matrix(weight, weight.parameter.detach())
        scores = scored.score(values, statistics, weight.name).clamp_min(0)
        found[weight.name] = calibration.from_matrix(weight, scores)

    batches = calibration.take(model, data, samples)
    calibration.calibrate(model, list(weights), batches, "norms", visit, display=display)
    return found
