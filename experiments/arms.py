"""The rows of a table: how a dense model is made sparse, and whether its training is repeated afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

import twofour
from tasks.base import Task
from twofour import criteria

DENSE = "dense"


@dataclass(frozen=True)
class Arm:
    """One row.

    Attributes:
        pattern: "2:4" and so on; "dense" for the control.
        criterion: Which values stay; "" for the control.
        permuted: Whether channels are permuted first.
        again: Whether the training is repeated.
        options: Further options of `twofour.prune`.
    """

    pattern: str
    criterion: str = ""
    permuted: bool = False
    again: bool = False
    options: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """As the page calls it: "2:4 wanda, permuted"."""
        if self.pattern == DENSE:
            return "dense, trained again (the control)"
        return f"{self.pattern} {self.criterion}{', permuted' if self.permuted else ''}"

    @property
    def key(self) -> str:
        """What tells one row of a record from another."""
        return f"{'again' if self.again else 'one-shot'}: {self.name}"

    def apply(self, model: nn.Module, task: Task, seed: int) -> None:
        """Prune the model in place, as the row says."""
        if self.pattern == DENSE:
            return
        given: dict[str, Any] = dict(self.options)
        if needs_data(self.criterion):
            given["data"] = task.calibration()
        if self.permuted:
            given |= {"permute": True, "example": task.example()}
        # A random mask must differ from seed to seed; its parameter is part of the criterion's text.
        chosen = f"random:seed={seed}" if self.criterion == "random" else self.criterion
        model.eval()
        twofour.prune(model, self.pattern, criterion=chosen, skip=task.skip, eligibility=task.eligibility, **given)


def needs_data(criterion: str) -> bool:
    """Whether a criterion looks at activations."""
    return criterion not in ("magnitude", "random")


def built(criterion: str) -> bool:
    """Whether this version has the criterion."""
    try:
        criteria.parse(criterion)
    except twofour.TwofourError:
        return False
    return True


CRITERIA = ("magnitude", "random", "wanda", "ria", "sparsegpt-mask", "sparsegpt", "admm")

ONE_SHOT = (
    *(Arm("2:4", criterion) for criterion in CRITERIA),
    *(Arm("2:4", criterion, permuted=True) for criterion in CRITERIA if criterion != "random"),
    *(Arm(pattern, "magnitude") for pattern in ("4:8", "1:4")),
)

CONTROL = Arm(DENSE, again=True)
AGAIN = (
    CONTROL,
    Arm("2:4", "magnitude", again=True),
    Arm("2:4", "random", again=True),
    Arm("2:4", "sparsegpt", permuted=True, again=True),
    Arm("4:8", "magnitude", again=True),
    Arm("1:4", "magnitude", again=True),
)
