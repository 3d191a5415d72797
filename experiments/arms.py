"""The rows of a table: how a dense model is made sparse, and whether its training is repeated afterwards."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import twofour
from tasks.base import Task
from twofour import criteria
from twofour.criteria import AUTO

DENSE = "dense"
SAMPLES = 1 << 20
"""Of the calibration data all are used: a task's `calibration` says how many there are."""
BATCHES = 16
"""Training batches that a criterion which follows the loss sees."""


@dataclass(frozen=True)
class Arm:
    """One row.

    Attributes:
        pattern: "2:4" and so on; "dense" for the control.
        criterion: Which values stay; "" for the control, "auto" for what `twofour.prune` does with data by itself;
            "default" for what `twofour.finetune` does with the dense model and the training to repeat, "held back"
            with a twentieth of its data kept from it to judge, "bare" with no optimiser and schedule given.
        permuted: Whether channels are permuted first.
        again: Whether the training is repeated.
        taught: Whether the trained control teaches meanwhile, as `twofour.finetune` has it; else it has `control=None`.
        last: Whether the control is pruned, after its training, and nothing is trained behind.
        own: Whether `twofour.finetune` trains the control itself, which teaches then, as it does where nobody says
            otherwise, or "bare" where it is handed a copy: the row is compared with that one.
        drawn: How many samples, drawn by the seed, calibrate: a number, or "default" for as many as `twofour.prune`
            takes of them by itself; "" for all of the task's own.
    """

    pattern: str
    criterion: str = ""
    permuted: bool = False
    again: bool = False
    taught: bool = False
    last: bool = False
    own: bool = False
    drawn: str = ""

    @property
    def name(self) -> str:
        """As the page calls it: "2:4 wanda, permuted"."""
        if self.pattern == DENSE:
            return "dense, trained again (the control)"
        how = f"{', permuted' * self.permuted}{', taught' * self.taught}{', pruned last' * self.last}"
        how += ", its own control" * self.own
        return f"{self.pattern} {self.criterion}{how}{self._amount}"

    @property
    def _amount(self) -> str:
        return (
            f", {self.drawn} samples"
            if self.drawn.isdecimal()
            else f", {self.drawn} number of samples" * bool(self.drawn)
        )

    @property
    def key(self) -> str:
        """What tells one row of a record from another."""
        return f"{'again' if self.again else 'one-shot'}: {self.name}"

    @property
    def whole(self) -> bool:
        """Whether `twofour.finetune` prunes the model itself."""
        return self.criterion in WHOLE

    def drawn_for(self, task: Task, seed: int) -> dict[str, Any]:
        """Draw the data, and return the arguments of `twofour.prune` that hold them."""
        if self.pattern == DENSE:
            return {}
        given: dict[str, Any] = {"samples": SAMPLES}
        if self.criterion in FOLLOW_LOSS:
            torch.manual_seed(seed)
            given |= {"data": list(itertools.islice(task.loader(seed), BATCHES)), "loss": task.loss}
        elif self.drawn:
            given = {"data": task.drawn(seed), "samples": int(self.drawn) if self.drawn.isdecimal() else None}
        elif self.criterion not in ("magnitude", "random"):
            given["data"] = task.calibration()
        if self.permuted:
            given |= {"permute": True, "example": task.example()}
        return given

    def apply(self, model: nn.Module, task: Task, seed: int, given: dict[str, Any]) -> None:
        """Prune the model in place, as the row says; `given` is what `drawn_for` returned."""
        if self.pattern == DENSE:
            return
        # A random mask must differ from seed to seed; its parameter is part of the criterion's text.
        chosen = f"random:seed={seed}" if self.criterion == "random" else self.criterion
        model.eval()
        twofour.prune(model, self.pattern, criterion=chosen, skip=task.skip, eligibility=task.eligibility, **given)


def built(criterion: str) -> bool:
    """Whether this version has the criterion."""
    try:
        criteria.resolve(criterion, None)
    except twofour.TwofourError:
        return False
    return True


FOLLOW_LOSS = ("taylor", "learned")
HELD_BACK = "held back"
BARE = "bare"
WHOLE = ("default", HELD_BACK, BARE)
CRITERIA = ("magnitude", "random", *FOLLOW_LOSS, "wanda", "ria", "sparsegpt-mask", "sparsegpt", "admm", AUTO)
PERMUTED = ("magnitude", "wanda", "ria", "sparsegpt")

ONE_SHOT = (
    *(Arm("2:4", criterion) for criterion in CRITERIA),
    *(Arm("2:4", criterion, permuted=True) for criterion in PERMUTED),
    *(Arm(pattern, "magnitude") for pattern in ("4:8", "1:4", "8:2:8")),
)

CONTROL = Arm(DENSE, again=True)
AGAIN = (
    CONTROL,
    Arm("2:4", "magnitude", again=True),
    Arm("2:4", "random", again=True),
    Arm("2:4", "sparsegpt", again=True),
    Arm("2:4", "sparsegpt", permuted=True, again=True),
    Arm("2:4", "admm", again=True),
    Arm("2:4", "admm", again=True, taught=True),
    Arm("2:4", AUTO, again=True),
    Arm("2:4", AUTO, again=True, taught=True),
    Arm("2:4", AUTO, again=True, last=True),
    *(Arm("2:4", whole, again=True) for whole in WHOLE),
    Arm("2:4", "default", again=True, taught=True),
    Arm("2:4", "default", again=True, own=True),
    Arm("2:4", BARE, again=True, own=True),
    Arm("4:8", "magnitude", again=True),
    Arm("1:4", "magnitude", again=True),
    Arm("8:2:8", "magnitude", again=True),
    Arm("2:4+25%", AUTO, again=True),
)


def one_shot(task: Task) -> tuple[Arm, ...]:
    """The rows of a task that are pruned alone."""
    further = (Arm(pattern, criterion) for pattern in task.patterns for criterion in ("magnitude", "admm"))
    return (
        *ONE_SHOT,
        *further,
        *(Arm("2:4", criterion, drawn=number) for number in task.draws for criterion in ("admm", AUTO)),
    )


def again(task: Task) -> tuple[Arm, ...]:
    """The rows of a task whose training is repeated."""
    return (*AGAIN, *(Arm(pattern, "admm", again=True) for pattern in task.patterns))
