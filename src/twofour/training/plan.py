"""What a run repeats: the recipe of the original training, checked before the first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from twofour.errors import TrainingError, integer_from, one_of
from twofour.masks import Mask
from twofour.training.batches import Loader, empty_loader, length, require_loader
from twofour.training.judge import Judge, Loss
from twofour.training.schemes import Scheme

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
ScheduleFactory = Callable[[Optimizer], LRScheduler]
Evaluate = Callable[[Any], float | Mapping[str, float]]
SchemeFactory = Callable[[nn.Module, int], Scheme]
"""Attaches a scheme to a model that is about to be trained for so many steps."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arguments of `finetune` that the sparse run and its control share, and who teaches the sparse run.

    `judge` chooses the state that stands at the end, None: the last.
    """

    loader: Loader
    loss: Loss
    optimizer: OptimizerFactory
    schedule: ScheduleFactory | None
    epochs: int
    evaluate: Evaluate | None = None
    seed: int = 0
    schedule_every: Literal["step", "epoch"] = "step"
    clip_norm: float | None = None
    checkpoint_every: int | None = None
    scheme: SchemeFactory | None = None
    taught: str | None = None
    judge: Judge | None = None

    def check(self) -> None:
        """Refuse, with a TrainingError, what could only fail later or mean something else than written."""
        kind, remedy = TrainingError, "as many epochs as the original training had"
        integer_from(1, "`epochs` cannot be used", kind, remedy, epochs=self.epochs)
        if self.checkpoint_every is not None:
            remedy = "a number of steps, or None for epochs alone"
            integer_from(1, "`checkpoint_every` cannot be used", kind, remedy, checkpoint_every=self.checkpoint_every)
        one_of(
            "`schedule_every` is not known",
            self.schedule_every,
            ("step", "epoch"),
            TrainingError,
            "say how often the original training called schedule.step()",
        )
        if self.clip_norm is not None and (not isinstance(self.clip_norm, Real) or not self.clip_norm > 0):
            raise TrainingError(
                "`clip_norm` is impossible",
                got=repr(self.clip_norm),
                wanted="a number over 0: torch turns gradients round with a negative one, and clears them with 0",
                remedy="clip_norm=1.0 is usual; leave it out not to clip",
            )
        if type(self.seed) is bool or not isinstance(self.seed, Integral):
            raise TrainingError(
                "`seed` cannot be used",
                got=repr(self.seed),
                wanted="a whole number: the order of the data follows from it and the epoch",
                remedy="leave it out for 0",
            )
        for name in ("loss", "optimizer", "schedule", "evaluate", "scheme"):
            require_called(name, getattr(self, name))
        require_repeatable(self.loader)

    def attach(self, model: nn.Module) -> Scheme | None:
        """Attach the scheme, if there is one.

        Raises:
            TrainingError: The factory returns something else, or the number of steps is not known.
        """
        if self.scheme is None:
            return None
        batches = length(self.loader)
        if batches is None:
            raise TrainingError(
                "a scheme needs to know how many steps there will be",
                got="a loader without a length",
                wanted="len(loader), batches per epoch",
                remedy="pass a DataLoader over a dataset with a length, or a list of batches",
            )
        return _made("scheme", self.scheme(model, self.epochs * batches), ("step", "penalty", "finish"))

    def start(self, model: nn.Module, masks: Mapping[str, Mask]) -> tuple[Optimizer, LRScheduler | None]:
        """A fresh optimiser, whose state is empty as the paper asks, and its schedule at its beginning.

        Raises:
            TrainingError: A factory returns something else, the optimiser does not hold every masked parameter, or the
                schedule needs a metric.
            MaskError: A masked module has lost its weight.
        """
        optimizer = _made("optimizer", self.optimizer(list(model.parameters())), ("param_groups", "step", "zero_grad"))
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        missing = [name for name, mask in masks.items() if id(mask.parameter) not in held]
        if missing:
            raise TrainingError(
                "the optimiser does not hold every masked weight, so some would never be trained",
                got=f"{len(missing)} of {len(masks)} missing: {', '.join(missing[:3])}",
                wanted="an optimiser over the parameters it is given",
                remedy="write the factory as `lambda params: torch.optim.SGD(params, lr=0.1)`",
            )
        schedule = self.schedule(optimizer) if self.schedule is not None else None
        if schedule is not None:
            _made("schedule", schedule, ("step", "state_dict"))
        if isinstance(schedule, ReduceLROnPlateau):
            raise TrainingError(
                "the schedule waits for a metric, so the control run would not follow the same schedule",
                got="ReduceLROnPlateau",
                wanted="a schedule of the step or epoch number",
                remedy="pass the schedule of the original training, for example CosineAnnealingLR",
            )
        return optimizer, schedule

    def fingerprint(self, optimizer: Optimizer, schedule: LRScheduler | None) -> dict[str, Any]:
        """What must be the same for an interrupted run to go on: called before the first step."""
        settings = [{k: str(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        teacher = {} if self.taught is None else {"teacher": self.taught}
        return {
            **teacher,
            "seed": self.seed,
            "epochs": self.epochs,
            "batches per epoch": length(self.loader),
            **({} if self.judge is None else {"keep": self.judge.keep}),
            **({} if self.judge is None or self.judge.held is None else {"held": self.judge.held.fingerprint}),
            "clip_norm": None if self.clip_norm is None else float(self.clip_norm),
            "schedule_every": self.schedule_every,
            "optimiser": type(optimizer).__name__,
            "settings of the optimiser": settings,
            "schedule": type(schedule).__name__,
            "settings of the schedule": dict(schedule.state_dict()) if schedule is not None else None,
        }


def require_repeatable(loader: object) -> None:
    """Refuse what is no loader, and one whose epochs would not follow from (seed, epoch) alone, or has none."""
    require_loader(loader)
    if isinstance(loader, Iterator):
        raise TrainingError(
            "the loader can be walked only once",
            got=f"an iterator ({type(loader).__name__})",
            wanted="something to iterate over once per epoch and run",
            remedy="pass a DataLoader or a list of batches",
        )
    if length(loader) == 0:  # pyright: ignore[reportArgumentType]
        raise empty_loader()
    if getattr(loader, "persistent_workers", False):
        raise TrainingError(
            "a loader with persistent workers cannot be repeated",
            got="persistent_workers=True: the workers' random numbers run on from epoch to epoch",
            wanted="an epoch that follows from (seed, epoch) alone, for the control run and for resuming",
            remedy="build the DataLoader with persistent_workers=False",
        )


_CALLED = {
    "loss": ("a function of output and target", "loss=torch.nn.functional.cross_entropy"),
    "optimizer": (
        "a function that builds the optimiser from the parameters",
        "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)",
    ),
    "schedule": (
        "a function that builds the schedule from the optimiser, or None",
        "schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)",
    ),
    "evaluate": ("a function of the model, or None", "evaluate=lambda model: accuracy(model, test_loader)"),
    "scheme": (
        "a function that attaches a scheme to the model, given the number of steps, or None",
        'scheme="block:16x16@0.9", or scheme=lambda model, steps: twofour.training.sr_ste.attach(model, "2:4")',
    ),
    "answer": ("a function of a model's output", "leave it out for `logits`"),
}
"""Arguments that are called: what they may be, and an example."""


def require_called(name: str, given: object) -> None:
    """Refuse an argument of `finetune` or `distilled` that is no function; some may be None."""
    if not callable(given) and not (given is None and name in ("schedule", "evaluate", "scheme")):
        wanted, remedy = _CALLED[name]
        raise TrainingError(f"`{name}` cannot be called", got=type(given).__name__, wanted=wanted, remedy=remedy)


def _made(name: str, found: Any, needs: tuple[str, ...]) -> Any:
    """Return what a factory made, unless it lacks what the loop calls."""
    if lacking := [need for need in needs if not hasattr(found, need)]:
        wanted, remedy = _CALLED[name]
        raise TrainingError(
            f"`{name}` returns something else",
            got=f"{type(found).__name__}, which has no `{lacking[0]}`",
            wanted=wanted,
            remedy=remedy,
        )
    return found
