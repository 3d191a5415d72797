"""SystolicArray: a grid of multiply-accumulate units of any size, and the way operands move through it."""

from __future__ import annotations

from dataclasses import dataclass

from twofour.errors import HardwareError, integer_from, one_of

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
