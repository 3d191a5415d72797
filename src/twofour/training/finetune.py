"""The paper's workflow: prune, then repeat the original training, optimiser state fresh, same schedule.

Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378), section 4: prune a
trained network once, then repeat its training with the mask fixed, same schedule, same number of epochs,
optimiser state from zero. "Sparse, trained again" against "dense, trained once" would flatter sparsity, hence
the control run.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import nn

from twofour.errors import TrainingError
from twofour.files import named
from twofour.layers import require_module
from twofour.patterns import Pattern
from twofour.progress import Progress
from twofour.recipe import Recipe
from twofour.training import checkpoint as checkpoints
from twofour.training import controls, defaults, loop, pruned_last, rates, strange_data, warm_start
from twofour.training.batches import Loader
from twofour.training.controls import Wish
from twofour.training.defaults import AUTO, Auto, is_auto
from twofour.training.judge import Keep
from twofour.training.lesson import taught
from twofour.training.plan import Evaluate, Loss, OptimizerFactory, Plan, ScheduleFactory, SchemeFactory
from twofour.training.result import OTHER, Result, Run
from twofour.training.schemes import gradual

log = logging.getLogger("twofour.training")


def finetune(
    model: nn.Module,
    loader: Loader,
    *,
    loss: Loss | Auto = AUTO,
    optimizer: OptimizerFactory | Auto = AUTO,
    schedule: ScheduleFactory | Auto | None = AUTO,
    epochs: int | Auto = AUTO,
    evaluate: Evaluate | None = None,
    control: nn.Module | Auto | None = AUTO,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    seed: int = 0,
    schedule_every: Literal["step", "epoch"] = "step",
    clip_norm: float | None = None,
    progress: bool = True,
    scheme: gradual.Patterns | SchemeFactory | None = None,
    teacher: nn.Module | Literal["auto", "dense", "control"] | None = AUTO,
    pattern: str | Pattern | Mapping[str, str | Pattern] | Recipe | None = None,
    prune: Mapping[str, Any] | None = None,
    held: Loader | None = None,
    keep: Keep | Literal["auto", "last"] = AUTO,
) -> Result:
    """Make a dense model sparse and train it, or train a pruned model again as it was trained before.

    Given a dense model it prunes it first, by what `twofour.prune` does with data, here batches of the loader, in
    another order of the channels where one loses less on data held back. The state with the least loss on some batches
    of the training stands, that before the first step too: what comes back is no worse there than what was pruned. The
    dense model has seen such data, so only data that it has not, as `held`, can tell which state is better on new ones.
    `Result.notes`, and the log at INFO before each part begins, say what is done and what it costs. Given a pruned
    model and its `optimizer` the last state stands, as in the paper, unless `keep` says otherwise.

    The learning rate is rewound: `optimizer` and `schedule` are those of the original training, begun anew. Where there
    is none, a rate is looked for by short trainings from the state that this one begins with, and of a pruned model too
    the best state stands. Where they are given, a copy of a dense model has the same training first, as a control, by
    the loss alone, and then teaches: half of the sparse model's loss is the distance to the control's answers (Hinton
    et al. 2015; `distilled`). That costs as many steps again, a forward pass of the control in each step of the sparse
    model and the memory of one more model; the difference to the control is that of sparsity and teaching together.
    Last, where the best state is to stand, that control is pruned as the model was: if it is judged better than each
    state of the sparse run, it stands instead, as a note tells (`Result.sparse.instead`). That costs one more pruning.
    `control=None` leaves out all three.
    With `teacher="dense"` a copy of the model as it came teaches instead: half of the loss of those batches that it
    answers clearly better.

    With `scheme` the model comes dense and becomes sparse meanwhile: `finetune(..., scheme="block:16x16@0.9")` prunes
    it more and more over the first half of the steps (`training.gradual`), the other half repairs.

    Both models are trained in place, on the same batches in the same order. The order of an epoch follows from (seed,
    epoch) alone; torch generators held by the loader are seeded for it and put back at the end, like the global random
    state. A random generator hidden elsewhere in the loader is not reached. Every epoch begins with `model.train()`.

    With `checkpoint`, a run that was killed continues when called again with the same arguments and a model with the
    same masks, or the same dense model, and ends with the same bits as an uninterrupted run on the same number of
    threads; where it has to prune once more, unless a warning says that reconstruction had fewer steps for want of
    time, whose number goes by the clock. Mid-epoch, batches already used are loaded again and left out.

    Args:
        model: A model pruned with `twofour.prune`, or a dense one; with `scheme` a dense one.
        loader: Yields (input, target) pairs, anew each epoch; an input is a tensor, a tuple of positional
            arguments or a dict of keyword arguments. Tensors are moved to the model's device. A dict with `labels`, as
            transformers' collators yield it, is the input, and its labels are the target; a model that takes none is
            called without them.
        loss: `loss(output, target)` -> tensor with one element. "auto": what the first batch asks for: the model's own
            `loss`, cross entropy or the squared error.
        optimizer: Builds the optimiser from the list of parameters, the same as in the original training. "auto":
            AdamW, at the best of up to five rates between 0.001 and 0.1 of the typical size of a weight, each tried for
            a tenth of the steps, 25 to 100; at 0.001 with `scheme`, and where something is attached to the model.
        schedule: Builds the learning-rate schedule from the optimiser; None: the rate stays. "auto": up over the first
            tenth of the steps and down to nothing as a cosine where the optimiser is "auto" too, else None.
        epochs: As many as the original training had. "auto": 3, or as many as give 500 steps, 10 at most.
        evaluate: `evaluate(model)` -> a number or a dict of numbers; called in evaluation mode without
            gradients, before the first step and after every epoch, of the control too.
        control: The dense model, copied before pruning; it gets the same extra training, before the sparse one. "auto":
            a copy made here, where a dense model is pruned, `optimizer` is given and the control is to teach; where
            none can be made that shares nothing with the model, `optimizer` does not take both alike, or there are no
            answers to compare in both modes, a warning says so, and there is none. None: none.
        checkpoint: Folder for `sparse.pt` and `control.pt`, written at the end of every epoch, and for `start.pt`, what
            a dense model was pruned to.
        checkpoint_every: Write them also every so many steps within an epoch.
        seed: Fixes the data order and the random numbers the model draws.
        schedule_every: Whether the schedule steps after every "step" or every "epoch".
        clip_norm: Clip the gradients to this total norm.
        progress: Show progress bars with the time left on standard error.
        scheme: How a dense model becomes sparse: an N:M or a pattern of blocks, for all layers or by a mapping or
            `Recipe` as `twofour.prune` takes them, or a function of the model and the number of steps that attaches a
            scheme of `twofour.training`, such as `gradual.during("1:4")` and `block_thresholds.during((4, 4))` return.
            Its penalty is added to the loss, but not to what is reported.
        teacher: Who teaches the sparse model: None: nobody; the "control"; the "dense" model, where it is pruned here;
            another model that is trained for the task already. "auto": the control, where there is one and a dense
            model is pruned here, else nobody. The first batch says first of all how answers are compared: as classes
            where the targets are whole numbers, or where the answers have `logits` and neither the targets nor `labels`
            among the inputs are floats; else by their values, relative to the teacher's; where they cannot be, a
            warning says so, and nobody teaches. Where the loader brings a teacher (`Taught`), nobody else teaches.
        pattern: What a dense model is pruned to, as `twofour.prune` takes it; None: "2:4".
        prune: Further arguments of `twofour.prune` for it, such as {"skip": ["head"], "permute": False}.
        held: Batches (input, target) of data that neither the dense model nor this training has seen, such as those of
            a validation loader, whose loss judges. None: batches of the loader judge, the first of its first epoch, a
            twentieth of an epoch but 128 samples at least and about 1024 at most; they are trained on all the same. Of
            a list of batches, which may be sorted, parts of batches spread over it judge, and others calibrate.
        keep: Which state stands at the end, of the control too: the "last"; that with the least "loss" on what judges;
            that with the "highest" or "lowest" answer of `evaluate`, of several numbers the first. "auto": "loss"
            where a dense model is pruned here or the learning rate is looked for, else "last".

    Returns:
        The histories of both runs, the difference of their final evaluations, and what was chosen.

    Raises:
        TrainingError: An argument is impossible, the model has both masks and a scheme, the optimiser does not hold all
            masks, the control is not a dense model of the same shapes or has an optimiser of other parameters, a
            teacher's answers have another shape, the loader is empty or yields no pairs, the loss is not finite, a
            dense model is wrapped for several devices, the checkpoint is of another run, or another process or thread
            uses its folder.
        FormatError: The checkpoint is truncated, damaged or foreign. The file is left untouched.
        MaskError: A pruned weight is no longer zero after an epoch.
        TwofourError: A dense model cannot be pruned: as `twofour.prune`.
    """
    require_module(model, TrainingError)
    factory = gradual.during(scheme) if isinstance(scheme, str | Pattern | Mapping | Recipe) else scheme
    folder = named(checkpoint, TrainingError, "`checkpoint`") if checkpoint is not None else None
    options = warm_start.options(model, pattern, prune, scheme=factory is not None, folder=folder)
    wish = controls.wished(teacher, model, control, dense=options is not None, known=not is_auto(optimizer))
    settings: dict[str, Any] = {"evaluate": evaluate, "seed": seed, "schedule_every": schedule_every}
    settings |= {"clip_norm": clip_norm, "checkpoint_every": checkpoint_every, "scheme": factory}
    left = {"loss": loss, "optimizer": optimizer, "schedule": schedule, "epochs": epochs}
    judged = options is not None or (is_auto(optimizer) and defaults.is_searched(model, factory))
    best = keep if keep != AUTO else "loss" if judged else "last"
    plan, notes = defaults.completed(model, loader, left, settings, best, held)
    with checkpoints.alone(folder), Progress(progress, stays=True) as display:
        beside, start, further = _ready(model, plan, options, wish, folder, progress)
        sparse, dense, told = _runs(model, plan, beside, folder, display, pruned=start is not None)
        sparse, last = pruned_last.compared(model, sparse, beside, start, further, progress=progress)
    return _logged(Result(sparse, dense, seed, beside.plan.taught, (*notes, *further, *told, *last)), beside.plan)


def _logged(result: Result, plan: Plan) -> Result:
    """Log what was won and what may win more, aloud of models that no epoch made better; return the result with it."""
    longer = rates.longer(result.sparse, plan)
    for line in (result.won, *longer):
        log.info("%s", line)
    runs = {"the model": result.sparse, "its control": result.control}
    if stuck := [who for who, run in runs.items() if run is not None and run.kept == 0 and run.instead is None]:
        which = "that state stands" if len(stuck) == 1 else "those states stand"
        log.warning(
            "no epoch made %s better than before the training, by what judges: %s. %s may do more",
            *(" or ".join(stuck), which, getattr(plan.optimizer, "advice", defaults.ADVICE)),
        )
    return dataclasses.replace(result, notes=(*result.notes, *longer))


def _ready(
    model: nn.Module, plan: Plan, options: Mapping[str, Any] | None, wish: Wish, folder: Path | None, progress: bool
) -> tuple[controls.Beside, warm_start.Start | None, list[str]]:
    """Find who stands beside the model, and prune it if it is dense; return both, and what is to be told."""
    start = None if options is None else warm_start.Start.checked(model, plan, options, folder)
    begun = checkpoints.teacher_of(folder)
    beside = controls.beside(model, plan, wish, begun)
    checkpoints.require_teacher(folder, begun, beside.plan.taught)
    notes = [*beside.notes, *warm_start.cost(model, beside, wish)]
    if start is not None:
        notes += [*strange_data.told(model, plan), start.prune(progress, beside.plan.taught)]
    with _noting_pruned(folder, pruned=start is not None):
        found, told = rates.found(model, plan, beside.plan, folder, progress=progress)
    return dataclasses.replace(beside, plan=found), start, [*notes, *told]


@contextmanager
def _noting_pruned(folder: Path | None, *, own: bool = False, pruned: bool) -> Iterator[None]:
    """Say of what ends a run before the model's own training where the model stands, and its `own` control."""
    try:
        yield
    except BaseException as error:
        if own:
            error.add_note("The control is finetune's own copy of the dense model, which is not handed back.")
        if pruned:
            goes_on = ", and the run goes on" if folder else " (with checkpoint= the run goes on)"
            error.add_note(f"The model is pruned and not trained yet; hand the dense model over again{goes_on}.")
        raise


def _runs(
    model: nn.Module, plan: Plan, beside: controls.Beside, folder: Path | None, display: Progress, *, pruned: bool
) -> tuple[Run, Run | None, list[str]]:
    """Train the control, then the model, `pruned` here or not; return both runs, and what is to be told of it."""
    control_run, told = None, []
    if (control := beside.control) is not None:
        alone = dataclasses.replace(plan, scheme=None, optimizer=beside.plan.optimizer)
        with _noting_pruned(folder, own=beside.own, pruned=pruned), controls.watched(model) as told:
            control_run = loop.run(control, alone, "control", folder and folder / "control.pt", display)
        control.zero_grad(set_to_none=True)  # it has no more need of them
    return loop.run(model, beside.plan, "sparse", folder and folder / "sparse.pt", display), control_run, told


def train(
    model: nn.Module,
    loader: Loader,
    *,
    loss: Loss,
    optimizer: OptimizerFactory,
    schedule: ScheduleFactory | None = None,
    epochs: int,
    evaluate: Evaluate | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    seed: int = 0,
    schedule_every: Literal["step", "epoch"] = "step",
    clip_norm: float | None = None,
    progress: bool = True,
    name: str = "dense",
    teacher: nn.Module | None = None,
) -> Run:
    """The original training that `finetune` repeats: the same loop and arguments, one model, masks or none.

    With `checkpoint`, the state is kept in the folder under `<name>.pt`; a `teacher` teaches as in `finetune`. Raises
    as `finetune` does.
    """
    plan = Plan(loader, loss, optimizer, schedule, epochs, evaluate, seed, schedule_every, clip_norm, checkpoint_every)
    plan.check()
    require_module(model, TrainingError)
    controls.require_teacher(teacher, model)
    plan = taught(plan, model, teacher, OTHER)
    folder = named(checkpoint, TrainingError, "`checkpoint`") if checkpoint is not None else None
    with checkpoints.alone(folder), Progress(progress, stays=True) as display:
        return loop.run(model, plan, name, folder and folder / f"{name}.pt", display)
