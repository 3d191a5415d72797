"""SystolicArray: a grid of multiply-accumulate units, the way operands move through it, and the exact cycles it takes.

Cycles are closed forms, for one shape or for arrays of shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twofour.errors import HardwareError, integer_from, one_of
from twofour.hardware.sizes import integer, require_integers

DATAFLOWS = ("os", "ws", "is")
"""What stays in the units while the other two operands move: outputs, weights or inputs."""


@dataclass(frozen=True)
class SystolicArray:
    """A systolic array: each unit multiplies and adds once a cycle and passes its operands to its neighbours.

    A product of x (m, k) by w (k, n) is cut into folds of the array's size, which run one after the other.

    Attributes:
        rows: Units down; they hold rows of the output ("os") or of the reduction ("ws", "is").
        columns: Units across; they hold columns of w ("os", "ws") or rows of x ("is").
        dataflow: One of `DATAFLOWS`.
    """

    rows: int
    columns: int
    dataflow: str = "os"

    def __post_init__(self) -> None:
        remedy, sizes = "SystolicArray(rows=32, columns=32)", {"rows": self.rows, "columns": self.columns}
        integer_from(1, "the systolic array cannot exist", HardwareError, remedy, **sizes)
        one_of(f"the dataflow {self.dataflow!r} is unknown", self.dataflow, DATAFLOWS, HardwareError, 'dataflow="os"')

    @property
    def units(self) -> int:
        """Multiply-accumulate units."""
        return self.rows * self.columns


def kept_reduction(k: Any, kept: int, group: int) -> Any:
    """Return how many of k reduction values N:M sparsity keeps: N of each whole group, at most N of the last."""
    rest = k % group
    return k // group * kept + rest - (rest > kept) * (rest - kept)


def folds(array: SystolicArray, m: Any, n: Any, k: Any) -> tuple[Any, Any, Any]:
    """Return folds down, folds across, and the values that stream through each unit in one fold."""
    across_down = {"os": (m, n, k), "ws": (k, n, m), "is": (k, m, n)}
    down, across, time = across_down[array.dataflow]
    return -(-down // array.rows), -(-across // array.columns), time


def fold_cycles(array: SystolicArray, time: Any) -> Any:
    """Return the cycles of one fold through which `time` values stream.

    "os": the values, and the skew of both operands: time + rows + columns - 2 (outputs leave beside the array as they
    are finished). "ws" and "is": the rows are loaded first, one a cycle, then values cross the columns and sums the
    rows: time + 2 rows + columns - 2. The fill and drain are those of SCALE-Sim (Samajdar et al., ISPASS 2020).
    """
    down = array.rows if array.dataflow == "os" else 2 * array.rows
    return time + down + array.columns - 2


def cycles(array: SystolicArray, m: Any, n: Any, k: Any, kept: int | None = None, group: int | None = None) -> Any:
    """Return the cycles of (m, k) by (k, n), folds one after the other.

    SCALE-Sim reports the index of the last cycle, which is one less.

    Args:
        array: The array.
        m: Rows of x; whole numbers from 1, or arrays of them that broadcast.
        n: Columns of w.
        k: Reduction.
        kept: Weights kept of each group along k, the N of N:M; the units skip the others. None with `group`: dense.
        group: The M of N:M.

    Raises:
        HardwareError: A size is impossible, N is above M, or one of them is given alone.
    """
    m, n, reduction = _sizes(m, n, k, kept, group)
    down, across, time = folds(array, m, n, reduction)
    return down * across * fold_cycles(array, time)


def utilisation(array: SystolicArray, m: Any, n: Any, k: Any, kept: int | None = None, group: int | None = None) -> Any:
    """Return the share of units times cycles that multiply a kept weight; 1 is every unit in every cycle.

    Raises:
        HardwareError: As `cycles`.
    """
    m, n, reduction = _sizes(m, n, k, kept, group)
    return m * n * reduction / (array.units * cycles(array, m, n, reduction))


def _sizes(m: Any, n: Any, k: Any, kept: Any, group: Any) -> tuple[Any, Any, Any]:
    """Return m, n and the reduction that is kept."""
    if not (type(m) is type(n) is type(k) is int and m > 0 and n > 0 and k > 0):  # a microsecond where all is well
        m, n, k = require_integers(
            "a product cannot have this size", "m rows, n columns, k reduction", arrays=True, m=m, n=n, k=k
        )
    if kept is None and group is None:
        return m, n, k
    most, size = integer(kept), integer(group)
    if most is None or size is None or most > size:
        raise HardwareError(
            "the weight cannot be sparse in this way",
            got=f"kept={kept}, group={group}",
            wanted="N and M of N:M, whole numbers with 1 <= N <= M, or neither",
            remedy="kept=2, group=4",
        )
    return m, n, kept_reduction(k, most, size)
