"""Figures over seeds: means, deviations, paired differences with their interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from records import Row, Run, Shrunk, Trained

Measured = Row | Run | Trained | Shrunk

# Two-sided 95 % quantiles of Student's t by degrees of freedom (any table of the distribution).
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def paired(rows: Sequence[Measured], control: Sequence[Measured]) -> list[tuple[float, float]]:
    """Values of the two with the same seed; of a row that had a control of its own, that one's."""
    other = {row.seed: row.value for row in control}
    own = {row.seed: row.control for row in rows if isinstance(row, Row) and row.control is not None}
    beside = other | own
    return [(row.value, beside[row.seed]) for row in rows if row.seed in beside]


def strangers(rows: Sequence[Row], control: Sequence[Row]) -> list[int]:
    """The seeds whose control in a row of its own began with another dense model."""
    other = {row.seed: row.dense for row in control}
    pairs = [(row, other[row.seed]) for row in rows if row.control is None and row.seed in other]
    return [row.seed for row, dense in pairs if round(row.dense, 2) != round(dense, 2)]


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean and half the 95 % interval of Student's t."""
    half = STUDENT[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), half


def difference(rows: Sequence[Measured], control: Sequence[Measured], decimals: int = 2) -> str:
    """The mean paired difference as the page prints it."""
    pairs = paired(rows, control)
    if not pairs:
        return "no control yet"
    if len(pairs) == 1:
        return f"{signed(pairs[0][0] - pairs[0][1], decimals)} (one seed)"
    mean, half = interval([a - b for a, b in pairs])
    return f"{signed(mean, decimals)} ± {half:.{decimals}f}"


def signed(value: float, decimals: int = 2) -> str:
    """Two decimals, or so many, and a sign."""
    return f"{round(value, decimals) + 0.0:+.{decimals}f}"  # + 0.0: no minus before zero


def values(found: Sequence[float], metric: dict[str, object]) -> str:
    """Mean ± deviation over seeds; of one accuracy, ± its binomial standard error."""
    mean, decimals = statistics.mean(found), metric.get("decimals", 2)
    if len(set(found)) > 1:
        return f"{mean:.{decimals}f} ± {statistics.stdev(found):.{decimals}f}"
    if metric["unit"] == "%":
        return f"{mean:.2f} ± {math.sqrt(mean * (100 - mean) / float(str(metric['held_out']))):.2f}"
    return f"{mean:.{decimals}f}"
