"""The training loop of one model, from its first step or its last checkpoint to the end of its last epoch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from twofour import calls, masks
from twofour.errors import MaskError, TrainingError, cut
from twofour.layers import full_tensor
from twofour.progress import Progress, spoken
from twofour.training import batches, randomness
from twofour.training.clipping import clipped_step
from twofour.training.judge import require_number
from twofour.training.lesson import Lesson
from twofour.training.plan import Plan
from twofour.training.result import Epoch, Evaluation, Run
from twofour.training.schemes import Scheme
from twofour.training.trainee import Trainee, ending

log = logging.getLogger("twofour.training")


def run(model: nn.Module, plan: Plan, name: str, file: Path | None, display: Progress) -> Run:
    """Train `model` in place as a checked `plan` says, under its masks; continue from the checkpoint `file`, if any.

    `name` is what the run is called in messages, progress and the result.

    Raises:
        TrainingError: The loss is not finite, the loader is empty or yields no pairs, or the checkpoint is of
            another run.
        FormatError: The checkpoint is damaged.
        MaskError: A pruned weight is no longer zero after an epoch.

    Whatever ends the run early, an interrupt too, leaves the best state so far where one is kept, and a note of it with
    the exception; the checkpoint stays that of the last save.
    """
    with calls.keeping_modes(model), randomness.undisturbed(plan.loader):
        trainee = Trainee.start(name, model, plan, file)
        pace = Pace(trainee, plan)
        torch.clear_autocast_cache()  # of weights before they were pruned, or read from a file
        steps = batches.length(plan.loader)
        done = 0 if steps is None else trainee.epoch * steps + trainee.step
        display.begin(f"training {name}, steps", None if steps is None else plan.epochs * steps, done)
        with ending(trainee.scheme), trainee.best_stands(plan.epochs):
            if not trainee.begun:
                trainee.before = evaluate(model, plan, -1)
                trainee.held = trainee.judged(plan, trainee.before, 0)
            while trainee.epoch < plan.epochs:
                train_epoch(trainee, plan, display, pace)
                finish_epoch(trainee, plan)
            if trainee.scheme is not None:
                trainee.scheme.finish()
    history = tuple(Epoch(**epoch) for epoch in trainee.history)
    kept = None if trainee.best is None else trainee.best.epoch
    return Run(name, trainee.before, history, trainee.seconds, trainee.held, kept)


def train_epoch(trainee: Trainee, plan: Plan, display: Progress, pace: Pace) -> None:
    """The steps of one epoch, or those that are left of it."""
    model, optimizer, schedule = trainee.model, trainee.optimizer, trainee.schedule
    model.train()
    if trainee.random is None:
        randomness.seed_everything(randomness.derive(plan.seed, trainee.epoch, "model"))
    else:
        randomness.restore(trainee.random)
        trainee.random = None
    for batch in batches.epoch_batches(plan.loader, plan.seed, trainee.epoch, skip=trainee.step):
        trainee.begun = True
        value = finite(stepped(model, plan, optimizer, batch, trainee.scheme), trainee)
        trainee.lr = float(optimizer.param_groups[0]["lr"])
        if schedule is not None and plan.schedule_every == "step":
            schedule.step()
        trainee.step += 1
        trainee.loss_sum += value
        trainee.taught += isinstance(plan.loader, Lesson) and plan.loader.teaches
        pace.step()
        display.advance(f"loss {value:.4f}")
        if plan.checkpoint_every and trainee.step % plan.checkpoint_every == 0:
            trainee.save()
    if trainee.step == 0:
        raise batches.empty_loader()


def stepped(
    model: nn.Module, plan: Plan, optimizer: Optimizer, batch: tuple[Any, Any], scheme: Scheme | None = None
) -> float:
    """Take one step and return its loss; where that is no finite number nothing is stepped."""
    device = next(model.parameters()).device
    output = batches.call(model, batches.to_device(batch[0], device))
    loss = plan.loss(output, batches.to_device(batch[1], device))
    require_number(loss)
    if not math.isfinite(value := float(loss.detach())):
        return value
    loss = loss if scheme is None else loss + scheme.penalty()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if plan.clip_norm is not None:
        masks.enforce(model)  # also of what the optimiser does not step: the norm is that of all gradients
        clipped_step(optimizer, plan.clip_norm, model.parameters())
    else:
        optimizer.step()
    if scheme is not None:
        scheme.step()
    # Autocast keeps copies of parameters until its outermost context ends, which may be around all of the training.
    torch.clear_autocast_cache()
    return value


def finish_epoch(trainee: Trainee, plan: Plan) -> None:
    """Schedule, masks, evaluation and checkpoint at the end of an epoch."""
    if trainee.schedule is not None and plan.schedule_every == "epoch":
        trainee.schedule.step()
    assert_masks_hold(trainee.model, trainee.epoch)
    loss = trainee.loss_sum / trainee.step
    evaluation = evaluate(trainee.model, plan, trainee.epoch)
    held = trainee.judged(plan, evaluation, trainee.epoch + 1)
    record = {"epoch": trainee.epoch + 1, "loss": loss, "lr": trainee.lr, "evaluation": evaluation, "held": held}
    if isinstance(plan.loader, Lesson) and plan.loader.guided:
        record["taught"] = trainee.taught / trainee.step
    trainee.history.append(record)
    log.info("%s epoch %d of %d: %s", trainee.name, record["epoch"], plan.epochs, Epoch(**record).told)
    trainee.epoch, trainee.step, trainee.taught, trainee.loss_sum = trainee.epoch + 1, 0, 0, 0.0
    trainee.save()


class Pace:
    """Tells from the first steps how long a run will take."""

    STEPS = 4

    def __init__(self, trainee: Trainee, plan: Plan) -> None:
        steps = batches.length(plan.loader)
        self.left = None if steps is None else (plan.epochs - trainee.epoch) * steps - trainee.step
        self.name, self.taken, self.since = trainee.name, 0, 0.0

    def step(self) -> None:
        """One step done; the first is not counted, since much is done for the first time in it."""
        self.taken += 1
        if self.taken == 1:
            self.since = time.perf_counter()
        elif self.taken == 1 + self.STEPS and self.left is not None:
            one = (time.perf_counter() - self.since) / self.STEPS
            log.info("%s run: %d steps at %.3g s, about %s", self.name, self.left, one, spoken(one * self.left))


def finite(value: float, trainee: Trainee) -> float:
    """The loss of a step, refused where it is no finite number; the weights are still those that gave it."""
    if not math.isfinite(value):
        where = f"epoch {trainee.epoch + 1}, step {trainee.step + 1}"
        raise TrainingError(
            f"the loss of the {trainee.name} run is not finite at {where}",
            got=str(value),
            wanted="a finite number",
            remedy="lower the learning rate, pass clip_norm=1.0, or look for bad values in this batch",
        )
    return value


def evaluate(model: nn.Module, plan: Plan, epoch: int) -> Evaluation | None:
    """What `evaluate` answers in evaluation mode; its random numbers do not touch the training."""
    if plan.evaluate is None:
        return None
    model.eval()
    with torch.no_grad(), randomness.undisturbed():
        randomness.seed_everything(randomness.derive(plan.seed, epoch, "evaluate"))
        answer: Any = plan.evaluate(model)
    try:
        if isinstance(answer, Mapping):
            return {str(name): float(value) for name, value in answer.items()}
        return float(answer)
    except (TypeError, ValueError) as error:
        raise TrainingError(
            "`evaluate(model)` must return a number, or a dict of numbers",
            got=cut(repr(answer), 80),
            wanted="what float() takes, or a dict of such",
            remedy="return for example the accuracy: (output.argmax(1) == target).float().mean()",
        ) from error


def assert_masks_hold(model: nn.Module, epoch: int) -> None:
    """Raise MaskError unless every pruned entry of every masked weight is zero."""
    for name, mask in masks.of(model).items():
        weight = full_tensor(mask.parameter.detach())
        revived = int((weight[~full_tensor(mask.keep)] != 0).sum())
        if revived:
            raise MaskError(
                f"pruned weights are no longer zero after epoch {epoch + 1}",
                got=f"{revived} non-zero entries outside the mask",
                wanted="zeros there after every optimiser step",
                remedy="let nothing but the optimiser's step write into the weights",
            ).for_layer(name)
