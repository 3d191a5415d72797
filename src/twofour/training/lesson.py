"""A teacher for a training that knows of none: the first batch says how its answers are compared."""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from twofour.training.batches import answered, to_device
from twofour.training.distillation import Answer, Kind, Taught, comparison, device_of, distilled, require_comparable
from twofour.training.judge import first_batch
from twofour.training.plan import Plan
from twofour.training.result import DENSE

_log = logging.getLogger("twofour.training")

SHARE = 0.5
"""Of the teacher in the loss (Hinton et al. 2015 weigh both terms)."""
CLEARLY = 0.5
"""Share of the student's loss below which a guiding teacher's is clearly better. A teacher that has learned the data by
heart is in most batches; one that more training would improve is not, and costs more than it brings: docs/training.md.
"""


class Lesson(Taught):
    """A taught loader with its loss, for a loss that knows nothing of a teacher: that of the student's plan.

    A `guided` student is taught in those batches alone whose loss the teacher makes less than `CLEARLY` of its own, so
    that one that is about as good, or may become better, is not held back. `teaches` tells of the last batch.
    """

    def __init__(self, plan: Plan, teacher: nn.Module, kind: Kind, answer: Answer, *, guided: bool = False) -> None:
        super().__init__(plan.loader, teacher, answer=answer)
        self._plain, self.guided, self._reached, self.teaches = plan.loss, guided, -math.inf, not guided
        mine = weakref.proxy(self)  # a cycle would keep the teacher alive
        weight = (lambda own: mine._share(own)) if guided else SHARE
        self.loss = distilled(plan.loss, weight=weight, kind=kind, answer=answer)

    def _answered(self, output: Any, target: Any) -> Tensor:
        if self.guided:
            self._reached = float(self._plain(output, to_device(target, device_of(self.teacher))))
        return super()._answered(output, target)

    def _share(self, own: Tensor) -> float:
        """Return a guiding teacher's share of the loss of a batch, of which the student has `own`."""
        theirs = float(own.detach())
        self.teaches = self._reached < theirs - (1 - CLEARLY) * abs(theirs)
        return SHARE if self.teaches else 0.0


@dataclasses.dataclass(frozen=True)
class Question:
    """What the first batch of a plan asks, how answers like a model's to it are compared, and its answer."""

    inputs: Any
    kind: Kind
    answer: Answer
    wanted: Tensor


def asked(plan: Plan, model: nn.Module, who: str) -> Question | None:
    """Ask a model the first batch; None, with a warning, where the answers of `who` teaches cannot be compared."""
    inputs, target = first_batch(plan.loader, plan.seed)
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    output = answered(model, inputs)
    if (found := comparison(output, labels if labels is not None else target)) is not None:
        return Question(inputs, *found, found[1](output))
    _log.warning(
        "nobody teaches the sparse model: %s answers with nothing that could be compared; say what is meant by "
        "training.Taught(loader, teacher, answer=) and training.distilled(loss, answer=), or teacher=None",
        who,
    )
    return None


def taught(plan: Plan, student: nn.Module, teacher: nn.Module | None, who: str) -> Plan:
    """Return the plan with a teacher, told by the first batch; without where there is none or a loader brings one.

    Where answers cannot be compared a warning says so, and the plan has none either.

    Raises:
        TrainingError: Student and teacher answer in different shapes.
    """
    if teacher is None or isinstance(plan.loader, Taught) or (question := asked(plan, teacher, who)) is None:
        return plan
    require_comparable(question.answer(answered(student, question.inputs)), question.wanted, question.kind)
    return teaching(plan, teacher, who, question)


def teaching(plan: Plan, teacher: nn.Module, who: str, question: Question) -> Plan:
    """Return the plan with a teacher whose answers are compared as those to the first batch."""
    guided, kind = who == DENSE, question.kind
    where = " in batches that it answers clearly better" if guided else ""
    _log.info("%s teaches%s: half of the loss is the distance of their answers, %s", who, where, kind)
    lesson = Lesson(plan, teacher, kind, question.answer, guided=guided)
    return dataclasses.replace(plan, loader=lesson, loss=lesson.loss, taught=who)
