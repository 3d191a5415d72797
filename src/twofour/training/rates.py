"""The learning rate where nobody gives one: short trainings from one state at rising rates, judged on other batches.

What a weight's size tells of a rate holds for a model that has converged. One that was pruned hard, or never trained to
the end, wants up to a hundred times as much, and the loss of batches that a short training has not seen tells them
apart: where it falls there is something to be won, where it rises the training forgets. Each trial is a whole cycle of
the rate, since at a constant one noise hides what a rate reaches once it falls. (The range test of Smith 2017,
"Cyclical Learning Rates for Training Neural Networks", arXiv 1506.01186, raises the rate within one run.)
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from twofour import calls, masks
from twofour.calibration import Batch
from twofour.progress import Progress
from twofour.training import checkpoint, judge, listed, randomness, trainee
from twofour.training.batches import epoch_batches, length
from twofour.training.defaults import ADVICE, Adamw, cycle
from twofour.training.distillation import Taught
from twofour.training.judge import Held
from twofour.training.loop import stepped
from twofour.training.plan import Plan
from twofour.training.result import Run

log = logging.getLogger("twofour.training")

TIMES = (1, 3, 10, 30, 100)
"""Rates that are tried, as multiples of the careful one."""
LEAST, MOST, SHARE = 25, 100, 10
"""Steps of a trial: one in so many of the training, but at least and at most so many."""
WORSE, MISSES = 0.25, 2
"""How far over the least loss of a trial, as a part of it, one is clearly worse, and how many in a row may be beaten by
another trial, before higher rates are left untried. The loss before them does not count: batch norms that meet their
data raise it at rates that learn nothing yet."""
GAIN, HOPE = 0.05, 0.5
"""Part of the loss below which twice as long is not worth naming, and how much of the power from a trial to the whole
training is left for what follows: docs/training.md has what came."""
FEW, CHANCE = 3, 0.02
"""Batches from which on they tell themselves how much losses differ by chance, and the part of a loss taken before."""
JUDGING = 5
"""One batch of a loader in so many judges at most, but of the fewest half: those that judge are not trained on."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a short training at a `rate` came to: the `losses` of batches that it has not seen."""

    rate: float
    losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        """Their mean, infinity for no number."""
        found = statistics.fmean(self.losses) if self.losses else math.inf
        return found if math.isfinite(found) else math.inf

    def beats(self, other: Trial) -> bool:
        """Whether the loss is less than another's by more than chance brings, as the batches tell where they can."""
        if math.isinf(self.loss) or math.isinf(other.loss):
            return self.loss < other.loss
        won = [theirs - own for own, theirs in zip(self.losses, other.losses, strict=True)]
        chance = CHANCE * abs(other.loss) if len(won) < FEW else statistics.stdev(won) / math.sqrt(len(won))
        return statistics.fmean(won) > chance


def found(model: nn.Module, plan: Plan, taught: Plan, folder: Path | None, *, progress: bool) -> tuple[Plan, list[str]]:
    """Return the plan of the sparse run with its learning rate, and what is to be told of it.

    The model and the random numbers are as they were afterwards. A run that goes on keeps its rate. Nothing is done
    where the caller chose the optimiser, or `defaults` the careful rate.

    Args:
        model: The model as its training will begin.
        plan: The training by the loss that judges.
        taught: The same with a teacher, if there is one.
        folder: Where the checkpoints are.
        progress: Show how far it is.

    Raises:
        TrainingError: The loss is no tensor with one element, or as `finetune`.
        FormatError: The checkpoint is damaged.
    """
    careful = taught.optimizer
    if not isinstance(careful, Adamw) or not careful.sought:
        return taught, []
    if (known := _of_checkpoint(folder, careful.rate)) is not None:
        return _at(taught, known), [f"the learning rate is that of the interrupted run, {known:g}"]
    held, skip = _judging(plan)
    steps = _steps(plan)
    log.info(
        "the learning rate is looked for: %d trials of %d steps at most, from this state; optimizer= saves them",
        *(len(TIMES), steps),
    )
    undisturbed = randomness.undisturbed(plan.loader)
    with _noting_the_end(), calls.keeping_modes(model), undisturbed, Progress(progress) as display:
        before = Trial(0.0, tuple(judge.held_losses(model, plan.loss, held)))
        display.begin("learning rate, steps of trials", len(TIMES) * steps)
        trials = list(_trials(model, plan, taught, (held, skip, steps), display))
    if not trials:
        note = f"the learning rate is a careful one, {careful.rate:g}: one batch cannot both train and judge, held= can"
        found = Adamw(careful.rate)
    else:
        found, note = _chosen(careful.rate, trials, before, held, steps)
    log.info("%s", note)
    return dataclasses.replace(taught, optimizer=found), [note]


@contextmanager
def _noting_the_end() -> Iterator[None]:
    """Say of what ends the trials early where the model stands: each of them puts its state back."""
    try:
        yield
    except BaseException as error:
        error.add_note("The trials of the learning rate ended early; the model has the state that they began with.")
        raise


def _chosen(careful: float, trials: list[Trial], before: Trial, held: Held, steps: int) -> tuple[Adamw, str]:
    """Return AdamW at the highest rate that no other beats, the careful one where none made the model better; say why.

    The highest, since a longer training settles what a short one leaves in noise.
    """
    best = [trial for trial in trials if trial.beats(before) and not any(o.beats(trial) for o in trials)]
    tried = ", ".join(f"{trial.rate:g}: {trial.loss:.4g}" for trial in trials)
    where = f"the loss on {held.samples} samples that {steps} steps did not see, {before.loss:.4g} before them"
    if not best:
        made = f"no trial made {where}, less by more than chance"
        return Adamw(
            careful, advice=_advice(trials)
        ), f"the learning rate is a careful one, {careful:g}: {made} ({tried})"
    rate = best[-1].rate
    lower, cycle_of = "A lower learning rate or more epochs", (steps, best[-1].loss) if held.apart else None
    return Adamw(
        rate, advice=lower, tried=cycle_of
    ), f"the learning rate is {rate:g}, the highest after which {where}, is about least ({tried})"


def longer(run: Run, plan: Plan) -> list[str]:
    """Say what a training twice as long may bring, by the trial at its rate and by itself: two whole cycles.

    Within one the loss tells nothing of that: it stands still once the rate is nothing, and may be least while it is
    high, however much a longer cycle would win. Between whole ones it is taken to fall by a power of their length, of
    which `HOPE` is held to last. Only where data are held back: those that are trained on are learnt by heart.
    """
    tried, steps = getattr(plan.optimizer, "tried", None), plan.epochs * (length(plan.loader) or 0)
    losses = [epoch.held for epoch in run.history if epoch.held is not None]
    if tried is None or len(losses) < plan.epochs or steps < 2 * tried[0] or not min(*losses, tried[1]) > 0:
        return []
    least, power = min(losses), HOPE * math.log(2) / math.log(steps / tried[0])
    gain = 1 - min(1.0, (least / tried[1]) ** power)
    more = f"may bring it to about {least * (1 - gain):.3g}" if gain >= GAIN else f"would bring less than {GAIN:.0%}"
    where = f"the loss on `held`, {tried[1]:.4g} after a trial of {tried[0]} steps"
    return [f"{where}, is {least:.4g} at best in {steps}: by that trend epochs={2 * plan.epochs} {more}"]


def _advice(trials: list[Trial]) -> str:
    """Return what may do more where no trial made the model better."""
    least = min(trials, key=lambda trial: trial.loss)
    if least.beats(trials[0]):
        return f"The trials lost less at higher learning rates, least at {least.rate:g}: such a one as optimizer="
    return "A lower learning rate or more epochs" if trials[0].beats(trials[-1]) else ADVICE


def _at(plan: Plan, rate: float) -> Plan:
    return dataclasses.replace(plan, optimizer=Adamw(rate))


def _steps(plan: Plan) -> int:
    """Return how many steps a trial has."""
    whole = plan.epochs * (length(plan.loader) or 0)
    return LEAST if not whole else min(whole, max(LEAST, min(MOST, whole // SHARE)))


def _judging(plan: Plan) -> tuple[Held, int]:
    """Return the data that judge trials, and how many batches at the beginning of an epoch they are, 0 of a list."""
    held = None if plan.judge is None else plan.judge.held
    held = held if held is not None else judge.trained_on(plan.loader, plan.seed)
    if held.apart or held.places:
        return held, 0
    whole = length(plan.loader) or len(held.batches)
    batches = held.batches[: max(1, whole // JUDGING, min(FEW, whole // 2))]
    return judge.of_training(batches), len(batches)


def _trials(
    model: nn.Module, plan: Plan, taught: Plan, data: tuple[Held, int, int], display: Progress
) -> Iterator[Trial]:
    """Yield one trial after the other, while higher rates may still beat the best; each leaves the model as it was."""
    (held, skip, steps), misses, best = data, 0, None
    start = trainee.Snapshot.of(model)
    assert isinstance(taught.optimizer, Adamw)
    for times in TIMES:
        rate = float(f"{times * taught.optimizer.rate:.2g}")
        try:
            done = _trained(model, _at(taught, rate), (held, skip), steps, display)
            losses = judge.held_losses(model, plan.loss, held) if done else ()
        finally:
            start.give_to(model)
            model.zero_grad(set_to_none=True)
        if done is None:
            return
        yield (trial := Trial(rate, tuple(losses)))
        best = best or trial
        misses = misses + 1 if best.beats(trial) else 0
        best = trial if trial.loss < best.loss else best
        if misses == MISSES or math.isinf(trial.loss) or trial.loss > best.loss + WORSE * abs(best.loss):
            return


def _trained(model: nn.Module, plan: Plan, but: tuple[Held, int], steps: int, display: Progress) -> bool | None:
    """Train for some steps, one cycle where the training has a schedule; tell whether the loss stayed finite.

    None: there is nothing to train on.
    """
    plan = dataclasses.replace(plan, schedule=None if plan.schedule is None else cycle(steps))
    optimizer, schedule = plan.start(model, masks.of(model))
    randomness.seed_everything(randomness.derive(plan.seed, 0, "rate"))
    model.train()
    taken = 0
    for batch in itertools.islice(_again(plan, *but), steps):
        if not math.isfinite(stepped(model, plan, optimizer, batch)):
            return False
        if schedule is not None:
            schedule.step()
        taken += 1
        display.advance(f"rate {optimizer.param_groups[0]['lr']:.2g}")
    return True if taken else None


def _again(plan: Plan, held: Held, skip: int) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of the first epoch but those that judge, again and again; of a list all that does not judge."""
    while True:
        empty = True
        for batch in _of_list(plan, held) if held.places else epoch_batches(plan.loader, plan.seed, 0, skip):
            empty = False
            yield batch
        if empty:
            return


def _of_list(plan: Plan, held: Held) -> Iterator[tuple[Any, Any]]:
    loader, judged = plan.loader, [Batch(inputs).samples for inputs, _ in held.batches]
    data = loader.loader if isinstance(loader, Taught) else loader
    rest = listed.beside(data, plan.seed, dict(zip(held.places, judged, strict=True)))
    return loader.answering(rest) if isinstance(loader, Taught) else rest


def _of_checkpoint(folder: Path | None, careful: float) -> float | None:
    """Return the rate of the run that a folder holds, None where it holds none.

    The careful one of a run by another optimiser than AdamW, which is refused when it is to go on: no trials before.
    """
    for name in ("sparse.pt", "control.pt"):
        state = None if folder is None else checkpoint.read(folder / name)
        if state is not None:
            if state["run"].get("optimiser") != "AdamW":
                return careful
            settings: Any = state["run"].get("settings of the optimiser")
            group: dict[str, Any] = settings[0] if settings else {}
            try:
                return float(group.get("initial_lr", group.get("lr", "")))
            except (TypeError, ValueError):  # of a caller's own AdamW, at a tensor as the rate
                return careful
    return None
