"""What a training run hands back: plain frozen records that become JSON without help."""

from __future__ import annotations

import dataclasses
from typing import Any

Evaluation = float | dict[str, float]
"""What `evaluate` answered: one number, or several by name."""
DENSE, CONTROL, OTHER = "the dense model", "the control", "another model"
"""Teachers, in words; the dense model is that which `finetune` has pruned."""
_LAST = "pruned control"


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One pass over the data.

    Attributes:
        epoch: Number of the epoch, from 1.
        loss: Mean of the loss over the epoch's steps; where a model is taught, the teacher's half included.
        lr: Learning rate of the optimiser's first group at the epoch's last step.
        evaluation: What `evaluate` answered after the epoch, None without one.
        held: Mean of the loss on the data that judge after the epoch, None where it does not judge.
        taught: Share of the steps in which a teacher taught that does so where it is clearly better, else None.
    """

    epoch: int
    loss: float
    lr: float
    evaluation: Evaluation | None
    held: float | None = None
    taught: float | None = None

    @property
    def told(self) -> str:
        """The loss, and what else is known."""
        judged = "" if self.held is None else f", {self.held:.4g} on what judges"
        evaluated = "" if self.evaluation is None else f", evaluation {shown(self.evaluation)}"
        return f"loss {self.loss:.4f}{judged}{evaluated}"


@dataclasses.dataclass(frozen=True)
class PrunedLast:
    """The control, pruned after its training, where a sparse model has its state instead of one of the model's own run.

    Attributes:
        held: Mean of the loss on the data that judge, None where `evaluate` judges.
        evaluation: What `evaluate` answered, None without one.
    """

    held: float | None
    evaluation: Evaluation | None


@dataclasses.dataclass(frozen=True)
class Run:
    """One model's training from its first step to its last.

    Attributes:
        name: "sparse", "control", or the name given to `train`.
        before: What `evaluate` answered before the first step; for a freshly pruned model the one-shot
            figure.
        history: One record per epoch.
        seconds: Working time, added up over the sessions when the run was interrupted.
        held: Mean of the loss on the data that judge before the first step, None where it does not judge.
        kept: The epoch whose state is the best of the run, 0 for that before the first step; None: the last.
        instead: What the model has instead of that state; None: it has that state.
    """

    name: str
    before: Evaluation | None
    history: tuple[Epoch, ...]
    seconds: float
    held: float | None = None
    kept: int | None = None
    instead: PrunedLast | None = None

    @property
    def _best(self) -> Epoch | None:
        """The epoch whose state is the best of the run; None: that before the first step is."""
        kept = len(self.history) if self.kept is None else self.kept
        return self.history[kept - 1] if kept else None

    @property
    def judged(self) -> float | None:
        """Loss on the data that judge of the state that the model has, None where it does not judge."""
        if self.instead is not None:
            return self.instead.held
        return self.held if self._best is None else self._best.held

    @property
    def evaluation(self) -> Evaluation | None:
        """What `evaluate` answered of the state that the model has."""
        return self.trained if self.instead is None else self.instead.evaluation

    @property
    def trained(self) -> Evaluation | None:
        """What `evaluate` answered of the best state of the run itself, whatever stands."""
        return self.before if self._best is None else self._best.evaluation

    @property
    def loss(self) -> float:
        """Mean loss of the last epoch."""
        return self.history[-1].loss

    @property
    def won(self) -> str:
        """What the training changed, in a sentence, by all that is known of it."""
        parts = [self._judging] if self._judging else []
        if self.trained is not None:
            last = "" if self.instead is None else f", {shown(self.instead.evaluation)} of the pruned control"
            parts.append(f"evaluation {shown(self.before)} before, {shown(self.trained)} after{last}")
        if not parts:
            parts.append(f"loss {self.history[0].loss:.4g} in the first epoch, {self.loss:.4g} in the last")
        return f"{self.name}: {', '.join(parts)}; {self._stands}"

    @property
    def stands(self) -> str:
        """Which state stands and its loss on what judges: what a table of evaluations does not tell."""
        return f"{self.name}: {self._judging}{'; ' if self._judging else ''}{self._stands}"

    @property
    def _judging(self) -> str:
        if self.held is None or self.judged is None:
            return ""
        own = self.held if self._best is None else self._best.held
        last = "" if self.instead is None else f", {self.judged:.4g} of the pruned control"
        return f"loss on what judges {self.held:.4g} before, {own:.4g} after{last}"

    @property
    def _stands(self) -> str:
        kept = len(self.history) if self.kept is None else self.kept
        state = f"the state after epoch {kept} of {len(self.history)}" if kept else "the state before the training"
        return f"{state} stands" if self.instead is None else f"the pruned control stands instead of {state}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists and numbers, ready for `json.dumps`."""
        return {**dataclasses.asdict(self), "history": [dataclasses.asdict(epoch) for epoch in self.history]}


@dataclasses.dataclass(frozen=True)
class Result:
    """The sparse run beside its control: the dense model that had the same extra training.

    Attributes:
        sparse: The run of the masked model.
        control: The run of the dense model, None without a control.
        seed: The seed both runs had.
        teacher: Who taught the sparse run; None: nobody.
        notes: What was chosen where the caller left it open, and what it costs, a sentence each.
    """

    sparse: Run
    control: Run | None
    seed: int
    teacher: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def difference(self) -> Evaluation | None:
        """Final evaluation of the sparse run minus that of the control, in the form `evaluate` answers."""
        if self.control is None:
            return None
        return _difference(self.sparse.evaluation, self.control.evaluation)

    @property
    def won(self) -> str:
        """What the training changed, of the control too, and how to know more."""
        parts = [run.won for run in (self.sparse, self.control) if run is not None]
        if self.difference is not None:
            parts.append(f"sparse minus control {shown(self.difference, sign='+')}")
        if self.sparse.evaluation is None:
            parts.append("evaluate=, a function of the model, tells what that is in accuracy")
        return "; ".join(parts)

    @property
    def seconds(self) -> float:
        """Working time of both runs."""
        return self.sparse.seconds + (self.control.seconds if self.control else 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists and numbers, ready for `json.dumps`."""
        return {
            "sparse": self.sparse.to_dict(),
            "control": self.control.to_dict() if self.control else None,
            "difference": self.difference,
            "seed": self.seed,
            "teacher": self.teacher,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        runs = [run for run in (self.sparse, self.control) if run is not None]
        rows = [(run.name, shown(run.before), shown(run.trained), _loss(run), str(len(run.history))) for run in runs]
        if (last := self.sparse.instead) is not None:
            rows.append((_LAST, "-", shown(last.evaluation), "-", "-"))
        name = max(9, *(len(row[0]) + 2 for row in rows))
        rows = [("run", "before", "after", "loss", "epochs"), *rows]
        lines = [f"{run:<{name}}{before:<14}{after:<14}{loss:<9}{epochs}" for run, before, after, loss, epochs in rows]
        if self.difference is not None:
            which = "sparse" if last is None else _LAST
            lines.append(f"{which} minus control: {shown(self.difference, sign='+')} (one run each, seed {self.seed})")
        lines += [run.stands for run in runs if run.kept is not None]
        if self.teacher is not None:
            shares = [epoch.taught for epoch in self.sparse.history if epoch.taught is not None]
            where = f" in {sum(shares) / len(shares):.1%} of its batches, clearly better there" if shares else ""
            half = f"half of the sparse run's loss{where}"
            lines.append(f"taught by {self.teacher}: {half}, not to be compared with others")
        return "\n".join([*lines, *self.notes])


def _loss(run: Run) -> str:
    """The training loss of the epoch whose state is the best of the run; before the first step there is none."""
    return "-" if run._best is None else f"{run._best.loss:.4f}"


def shown(evaluation: Evaluation | None, sign: str = "") -> str:
    """Return numbers as they are told."""
    if isinstance(evaluation, dict):
        return ", ".join(f"{name} {value:{sign}.4g}" for name, value in evaluation.items())
    return "-" if evaluation is None else f"{evaluation:{sign}.4g}"


def _difference(sparse: Evaluation | None, control: Evaluation | None) -> Evaluation | None:
    if isinstance(sparse, dict) and isinstance(control, dict):
        return {name: value - control[name] for name, value in sparse.items() if name in control}
    if isinstance(sparse, float) and isinstance(control, float):
        return sparse - control
    return None
