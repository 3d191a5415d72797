"""The paper's workflow after pruning: repeat the original training, optimiser state fresh, same schedule.

Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378), section 4: prune a
trained network once, then repeat its training with the mask fixed, same schedule, same number of epochs,
optimiser state from zero. "Sparse, trained again" against "dense, trained once" would flatter sparsity, hence
the control run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import nn

from twofour import masks
from twofour.errors import TrainingError
from twofour.files import named
from twofour.layers import describe_attached, require_module
from twofour.patterns import Pattern
from twofour.progress import Progress
from twofour.recipe import Recipe
from twofour.training import checkpoint as checkpoints
from twofour.training import loop
from twofour.training.batches import Loader
from twofour.training.distillation import Lesson, Taught
from twofour.training.plan import Evaluate, Loss, OptimizerFactory, Plan, ScheduleFactory, SchemeFactory
from twofour.training.result import Result, Run
from twofour.training.schemes import gradual


def finetune(
    model: nn.Module,
    loader: Loader,
    *,
    loss: Loss,
    optimizer: OptimizerFactory,
    schedule: ScheduleFactory | None = None,
    epochs: int,
    evaluate: Evaluate | None = None,
    control: nn.Module | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    seed: int = 0,
    schedule_every: Literal["step", "epoch"] = "step",
    clip_norm: float | None = None,
    progress: bool = True,
    scheme: gradual.Patterns | SchemeFactory | None = None,
    teacher: nn.Module | Literal["control"] | None = None,
) -> Result:
    """Train a pruned model again as it was trained before, and the dense model beside it as a control.

    With `teacher="control"` the control is trained first, by the loss alone, and then teaches: half of the sparse
    model's loss is the distance to the control's answers (Hinton et al. 2015; `distilled`). It costs a forward pass of
    the control in each step, and the difference is then that of sparsity and teaching together.

    With `scheme` the model comes dense and becomes sparse meanwhile: `finetune(..., scheme="block:16x16@0.9")` prunes
    it more and more over the first half of the steps (`training.gradual`), the other half repairs.

    Both models are trained in place, on the same batches in the same order. The order of
    an epoch follows from (seed, epoch) alone; torch generators held by the loader are seeded for it and put
    back at the end, like the global random state. A random generator hidden elsewhere in the loader is not
    reached. Every epoch begins with `model.train()`.

    With `checkpoint`, a run that was killed continues when called again with the same arguments and a model
    with the same masks, and ends with the same bits as an uninterrupted run on the same number of threads.
    Mid-epoch, batches already used are loaded again and left out.

    Args:
        model: A model pruned with `twofour.prune`; with `scheme` a dense one.
        loader: Yields (input, target) pairs, anew each epoch; an input is a tensor, a tuple of positional
            arguments or a dict of keyword arguments. Tensors are moved to the model's device.
        loss: `loss(output, target)` -> tensor with one element.
        optimizer: Builds the optimiser from the list of parameters, the same as in the original training.
        schedule: Builds the learning-rate schedule from the optimiser.
        epochs: As many as the original training had.
        evaluate: `evaluate(model)` -> a number or a dict of numbers; called in evaluation mode without
            gradients, before the first step and after every epoch.
        control: The dense model, copied before pruning; it gets the same extra training, before the sparse one.
        checkpoint: Folder for `sparse.pt` and `control.pt`, written at the end of every epoch.
        checkpoint_every: Write them also every so many steps within an epoch.
        seed: Fixes the data order and the random numbers the model draws.
        schedule_every: Whether the schedule steps after every "step" or every "epoch".
        clip_norm: Clip the gradients to this total norm.
        progress: Show progress bars with the time left on standard error.
        scheme: How a dense model becomes sparse: an N:M or a pattern of blocks, for all layers or by a mapping or
            `Recipe` as `twofour.prune` takes them, or a function of the model and the
            number of steps that attaches a scheme of `twofour.training`, such as `gradual.during("1:4")` and
            `block_thresholds.during((4, 4))` return. Its penalty is added to the loss, but not to what is reported.
        teacher: Who teaches the sparse model: nobody; the "control", where there is one; another model that is trained
            for the task already. The first batch says how answers are compared: as classes where the targets are
            whole numbers, or where the answers have `logits` and neither the targets nor `labels` among the inputs are
            floats; else by their values, relative to the teacher's; where they cannot be, a warning says so, and
            nobody teaches. Where the loader brings a teacher already (`Taught`), nobody else teaches.

    Returns:
        The histories of both runs and the difference of their final evaluations.

    Raises:
        TrainingError: An argument is impossible, the model has neither masks nor a scheme or has both, the optimiser
            does not hold all masks, the control is not a dense model of the same shapes, the loader is empty or yields
            no pairs, the loss is not finite, or the checkpoint is of another run, or another process or thread uses
            its folder.
        FormatError: The checkpoint is truncated, damaged or foreign. The file is left untouched.
        MaskError: A pruned weight is no longer zero after an epoch.
    """
    factory = gradual.during(scheme) if isinstance(scheme, str | Pattern | Mapping | Recipe) else scheme
    repeated = Plan(
        loader, loss, optimizer, schedule, epochs, evaluate, seed, schedule_every, clip_norm, checkpoint_every
    )
    plan = dataclasses.replace(repeated, scheme=factory)
    plan.check()
    require_module(model, TrainingError)
    require_teacher(teacher, model)
    if factory is None:
        check_masked(model)
    if control is not None:
        check_control(control, model)
    folder = named(checkpoint, TrainingError, "`checkpoint`") if checkpoint is not None else None
    with checkpoints.alone(folder), Progress(progress, stays=True) as display:
        teaches = control if teacher == "control" else teacher
        plan = _taught(plan, teaches, "the control" if teaches is control else "another model")
        control_run = None
        if control is not None:
            control_run = loop.run(control, repeated, "control", folder and folder / "control.pt", display)
        sparse_run = loop.run(model, plan, "sparse", folder and folder / "sparse.pt", display)
    return Result(sparse_run, control_run, seed, _teacher(plan))


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
    require_teacher(teacher, model, control=False)
    plan = _taught(plan, teacher, "another model")
    folder = named(checkpoint, TrainingError, "`checkpoint`") if checkpoint is not None else None
    with checkpoints.alone(folder), Progress(progress, stays=True) as display:
        return loop.run(model, plan, name, folder and folder / f"{name}.pt", display)


def require_teacher(teacher: object, model: nn.Module, *, control: bool = True) -> None:
    """Refuse a teacher that is no other model, nor nobody, nor the control where there may be one."""
    if teacher is model:
        raise TrainingError(
            "the model cannot teach itself",
            got="teacher=model",
            wanted="another model, trained for the task",
            remedy="copy.deepcopy(model) before it is pruned",
        )
    if teacher is None or isinstance(teacher, nn.Module) or (control and teacher == "control"):
        return
    named = '"control", ' if control else ""
    raise TrainingError(
        "there is no such teacher",
        got=repr(teacher) if isinstance(teacher, str) else type(teacher).__name__,
        wanted=f"{named}a torch.nn.Module that is trained for the task, or None",
        remedy="leave it out: nobody teaches then",
    )


def _taught(plan: Plan, teacher: nn.Module | None, who: str) -> Plan:
    """Return the plan with a teacher, where there is one and the loader brings none."""
    if teacher is None or isinstance(plan.loader, Taught):
        return plan
    lesson = Lesson(plan, teacher, who)
    return dataclasses.replace(plan, loader=lesson, loss=lesson.loss, taught=who)


def _teacher(plan: Plan) -> str | None:
    """Return who has taught."""
    return None if isinstance(plan.loader, Lesson) and plan.loader.silent else plan.taught


def check_masked(model: nn.Module) -> None:
    """Refuse a model with neither masks nor anything that is trained in its layers."""
    if not masks.of(model) and not describe_attached(model):  # low bits are trained without masks too
        raise TrainingError(
            "the model has no masks, so nothing would stay sparse",
            got=f"{type(model).__name__} without a masked weight",
            wanted="a model returned by twofour.prune",
            remedy='call twofour.prune(model, "2:4") first, or scheme="2:4" prunes meanwhile; for a dense model use '
            "twofour.training.train",
        )


def check_control(control: nn.Module, model: nn.Module) -> None:
    """Refuse a control that is no module, masked, shares weights with the model, or is another network."""
    if not isinstance(control, nn.Module):
        raise _bad_control(type(control).__name__)
    if masks.of(control):
        got = "the pruned model itself" if control is model else f"{len(masks.of(control))} masked weights"
        raise _bad_control(got)
    mine = {id(parameter) for parameter in model.parameters()}
    shared = [name for name, parameter in control.named_parameters() if id(parameter) in mine]
    if shared:
        raise _bad_control(f"{len(shared)} weights shared with the pruned model: {', '.join(shared[:3])}")
    shapes = [{name: tuple(p.shape) for name, p in m.named_parameters()} for m in (control, model)]
    for name in dict.fromkeys((*shapes[0], *shapes[1])):
        if shapes[0].get(name) != shapes[1].get(name):
            raise _bad_control(f"`{name}` is {shapes[0].get(name)} there and {shapes[1].get(name)} in the pruned model")


def _bad_control(got: str) -> TrainingError:
    return TrainingError(
        "the control cannot be compared with the pruned model",
        got=got,
        wanted="the dense model from before pruning, with weights of its own",
        remedy='keep a copy: control = copy.deepcopy(model); twofour.prune(model, "2:4")',
    )
