"""How far the correlations that few rows show are to be trusted, judged on rows held back.

A few rows tell how large each input is sooner than how two of them go together, and an update by X^T X fits the rows
rather than the task. Where there are few, X^T X is shrunk towards its diagonal (Ledoit and Wolf 2004, "A
well-conditioned estimator for large-dimensional covariance matrices"; the diagonal as target: Schaefer and Strimmer
2005) by the share after which a quick form of "admm" loses least on rows that it has not seen. At 0 that is X^T X as it
is, at 1 Wanda's mask, and every value kept stays as it was: what is chosen is no worse than either there.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from twofour.calibration import Statistics
from twofour.criteria.admm import ADMM
from twofour.criteria.base import Layerwise
from twofour.patterns import Pattern

SHARES = (0.0, 0.1, 0.3, 1.0)
"""Of the correlations, what is left out; the first that loses least is taken."""

REFINE = 15
"""Steps of conjugate gradients in a trial, without a search for the mask: a fifth of the time of "admm", and the order
of the shares is that of "admm" itself, which SparseGPT's, another fifth of that, is not: of MiniLM's pooler on 850
rows SparseGPT loses as much by 0 and 0.1, and "admm" 9 % more by 0.1."""

ROUNDING = 1e-5
"""Part of a sum of squares that float32 may leave of a difference of two equal ones."""


def trusted(weight: Tensor, pattern: Pattern, statistics: Statistics, criterion: Layerwise, name: str) -> str:
    """Choose the share by which a weight's statistics are shrunk, where they are of few rows; return what to say of it.

    Weights that read one input share its statistics, and the choice of the first of them.

    Args:
        weight: The matrix (groups, rows, in).
        pattern: The pattern along the last axis.
        statistics: Of its inputs; `shrunk` is set.
        criterion: What will solve the weight: "admm", since others are as their papers have them.
        name: Name of the weight.

    Raises:
        PatternError: The scores hold NaN or infinity.
    """
    if "trusted" not in statistics.memo:
        statistics.memo["trusted"] = ""
        if isinstance(criterion, ADMM) and (parts := statistics.parted()) is not None:
            statistics.memo["trusted"] = _choose(weight, pattern, statistics, parts, criterion, name)
    return statistics.memo["trusted"]


def _choose(
    weight: Tensor,
    pattern: Pattern,
    statistics: Statistics,
    parts: tuple[Statistics, Statistics],
    criterion: ADMM,
    name: str,
) -> str:
    (used, held), lost = parts, dict[float, float]()
    assert used.hessian is not None, "parted"
    matrix, quick = weight.detach().to(used.hessian.dtype), replace(criterion, steps=0, refine=REFINE)
    amount = f"few rows, {statistics.rows} for {weight.shape[-1]} inputs"
    if not _judges(matrix, statistics, parts):
        return (
            f"{amount}: not judged, since rows on one side, held back or not, bring nothing to compare, so as they are"
        )
    for share in SHARES:
        used.shrunk = share
        solution = quick.solve(matrix, pattern, used, name)
        lost[share] = held.error(matrix, solution.applied(matrix))
        used.memo.clear()
    if not all(map(math.isfinite, lost.values())):
        return f"{amount}: not judged, since the errors on {held.rows} held back are beyond floats, so as they are"
    statistics.shrunk = min(lost, key=lost.__getitem__)
    if not statistics.shrunk:
        return f"{amount}: their correlations lost least on {held.rows} held back as they are"
    return (
        f"{amount}: by their correlations less {statistics.shrunk:.0%}, which lost {lost[statistics.shrunk]:.4f} on "
        f"{held.rows} held back, {lost[0.0]:.4f} as they are"
    )


def _judges(matrix: Tensor, statistics: Statistics, parts: tuple[Statistics, Statistics]) -> bool:
    """Tell whether both sides hold something: what is left of a difference of equal sums is rounding."""
    used, held = parts
    assert used.hessian is not None and statistics.hessian is not None, "parted"
    left, whole = (float(one.diagonal(dim1=1, dim2=2).sum()) for one in (used.hessian, statistics.hessian))
    return left > ROUNDING * whole and held.energy(matrix) > 0
