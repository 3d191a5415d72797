"""What a run repeats: the recipe of the original training, checked before the first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from twofour.errors import TrainingError
from twofour.masks import Mask
from twofour.training.batches import Loader, length

Loss = Callable[[Any, Any], torch.Tensor]
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
ScheduleFactory = Callable[[Optimizer], LRScheduler]
Evaluate = Callable[[Any], float | Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arguments of `finetune` that the sparse run and its control share."""

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

    def check(self) -> None:
        """Refuse, with a TrainingError, what could only fail later or mean something else than written."""
        _positive("epochs", self.epochs)
        if self.checkpoint_every is not None:
            _positive("checkpoint_every", self.checkpoint_every)
        if self.schedule_every not in ("step", "epoch"):
            raise TrainingError(
                "`schedule_every` is not known",
                got=repr(self.schedule_every),
                wanted='"step" or "epoch"',
                remedy="say how often the original training called schedule.step()",
            )
        if self.clip_norm is not None and (not isinstance(self.clip_norm, int | float) or not self.clip_norm > 0):
            raise TrainingError(
                "`clip_norm` is impossible",
                got=repr(self.clip_norm),
                wanted="a number over 0: torch turns gradients round with a negative one, and clears them with 0",
                remedy="clip_norm=1.0 is usual; leave it out not to clip",
            )
        if isinstance(self.loader, Iterator):
            raise TrainingError(
                "the loader can be walked only once",
                got=f"an iterator ({type(self.loader).__name__})",
                wanted="something to iterate over once per epoch and run",
                remedy="pass a DataLoader or a list of batches",
            )
        if length(self.loader) == 0:
            raise empty_loader()
        if getattr(self.loader, "persistent_workers", False):
            raise TrainingError(
                "a loader with persistent workers cannot be repeated",
                got="persistent_workers=True: the workers' random numbers run on from epoch to epoch",
                wanted="an epoch that follows from (seed, epoch) alone, for the control run and for resuming",
                remedy="build the DataLoader with persistent_workers=False",
            )

    def start(self, model: nn.Module, masks: Mapping[str, Mask]) -> tuple[Optimizer, LRScheduler | None]:
        """A fresh optimiser, whose state is empty as the paper asks, and its schedule at its beginning.

        Raises:
            TrainingError: The optimiser does not hold every masked parameter, or the schedule needs a metric.
        """
        optimizer = self.optimizer(list(model.parameters()))
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        missing = [name for name, mask in masks.items() if id(getattr(mask.module, mask.attribute)) not in held]
        if missing:
            raise TrainingError(
                "the optimiser does not hold every masked weight, so some would never be trained",
                got=f"{len(missing)} of {len(masks)} missing: {', '.join(missing[:3])}",
                wanted="an optimiser over the parameters it is given",
                remedy="write the factory as `lambda params: torch.optim.SGD(params, lr=0.1)`",
            )
        schedule = self.schedule(optimizer) if self.schedule is not None else None
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
        return {
            "seed": self.seed,
            "epochs": self.epochs,
            "batches per epoch": length(self.loader),
            "clip_norm": self.clip_norm,
            "schedule_every": self.schedule_every,
            "optimiser": type(optimizer).__name__,
            "settings of the optimiser": settings,
            "schedule": type(schedule).__name__,
            "settings of the schedule": dict(schedule.state_dict()) if schedule is not None else None,
        }


def empty_loader() -> TrainingError:
    """The error for an epoch without a single batch."""
    return TrainingError(
        "the loader is empty",
        got="no batch",
        wanted="at least one (input, target) pair per epoch",
        remedy="look at the dataset's length, and at `drop_last` with a batch size beyond it",
    )


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TrainingError(
            f"`{name}` cannot be used",
            got=repr(value),
            wanted="a whole number, at least 1",
            remedy="epochs: as many as the original training had; checkpoint_every: steps, None for epochs alone",
        )
