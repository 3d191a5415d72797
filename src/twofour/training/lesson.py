"""A teacher for a training that knows of none: the first batch says how its answers are compared."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from twofour.training.batches import to_device
from twofour.training.distillation import Answer, Kind, Taught, comparison, device_of, distilled
from twofour.training.plan import Loss, Plan

_log = logging.getLogger("twofour.training")

SHARE = 0.5
"""Of the teacher in the loss (Hinton et al. 2015 weigh both terms)."""
CLEARLY = 0.5
"""Share of the student's loss below which a guiding teacher's is clearly better. A teacher that has learned the data by
heart is in most batches; one that more training would improve is not, and costs more than it brings: docs/training.md.
"""


class Lesson(Taught):
    """A taught loader with its loss, for a loss that knows nothing of a teacher: the targets say what is compared.

    Args:
        plan: Of the student, whose loader and loss are taken.
        teacher: Answers each batch in evaluation mode, as it is by then.
        who: The teacher, in words, for the log.
        guided: Whether it teaches in those batches alone whose loss it makes less than `CLEARLY` of the student's, so
            that a student that is about as good, or may become better, is not held back; else in all.
    """

    def __init__(self, plan: Plan, teacher: nn.Module, who: str, *, guided: bool = False) -> None:
        super().__init__(plan.loader, teacher)
        self._plain, self._who, self._guided = plan.loss, who, guided
        self._reached = -math.inf
        self._loss: Loss | None = None
        self._found: tuple[Kind, Answer] | None = None
        self._begun = False

    @property
    def silent(self) -> bool:
        """Whether the first batch has shown that nothing can be compared."""
        return self._begun and self._found is None

    def _answered(self, output: Any, inputs: Any, target: Any) -> Tensor | None:
        if not self._begun:
            labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
            self._begin(comparison(output, labels if labels is not None else target))
        if self._found is None:
            return None
        if self._guided:
            self._reached = float(self._plain(output, to_device(target, device_of(self.teacher))))
        return self._found[1](output)

    def _share(self, own: Tensor) -> float:
        """Return the teacher's share of the loss of a batch, of which the student has `own`."""
        theirs = float(own.detach())
        return SHARE if not self._guided or self._reached < theirs - (1 - CLEARLY) * abs(theirs) else 0.0

    def _begin(self, found: tuple[Kind, Answer] | None) -> None:
        self._begun, self._found = True, found
        if found is None:
            _log.warning(
                "nobody teaches the sparse model: %s answers with nothing that could be compared; say what is meant by "
                "training.Taught(loader, teacher, answer=) and training.distilled(loss, answer=), or teacher=None",
                self._who,
            )
            return
        kind, answer = found
        where = " in batches that it answers clearly better" if self._guided else ""
        _log.info("%s teaches%s: half of the loss is the distance of their answers, %s", self._who, where, kind)
        self._loss = distilled(self._plain, weight=self._share, kind=kind, answer=answer)

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss of a batch of this loader: the plain one where answers cannot be compared."""
        return self._plain(output, target[0]) if self._loss is None else self._loss(output, target)
