"""The dense model beside the sparse one: a control that has the same training, and whoever teaches."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from twofour import masks
from twofour.errors import TrainingError, cut
from twofour.training.defaults import is_auto
from twofour.training.distillation import Taught
from twofour.training.lesson import taught
from twofour.training.plan import Plan
from twofour.training.result import CONTROL, DENSE, OTHER

log = logging.getLogger("twofour.training")


@dataclass(frozen=True)
class Wish:
    """What a caller wants beside the model: "auto" is a control that is copied from it and teaches.

    `asked` tells whether the control must teach, `known` whether the caller told what the training was.
    """

    control: nn.Module | Literal["auto"] | None
    teacher: nn.Module | str | None
    asked: bool
    known: bool


@dataclass(frozen=True)
class Beside:
    """The models beside the one that becomes sparse: a control, a copy of the caller's `own` or not, and the teacher.

    The `plan` is that of the sparse run, with its teacher; `notes` say why there is no control where one is expected.
    """

    control: nn.Module | None
    plan: Plan
    own: bool = False
    notes: tuple[str, ...] = ()


def beside(model: nn.Module, plan: Plan, wish: Wish, folder: Path | None) -> Beside:
    """Return the control and the plan of a sparse run that is taught; a dense model is copied for them, before pruning.

    Raises:
        TrainingError: The teacher answers in another shape, the model cannot be copied to teach, or the optimiser of
            the control would hold the model's weights.
    """
    control, teacher = wish.control, wish.teacher
    if isinstance(plan.loader, Taught):  # nobody else teaches
        return Beside(control if isinstance(control, nn.Module) else None, plan)
    if isinstance(control, str):
        found = _made(model, plan, wish, folder)
        if isinstance(found, Beside):
            return found
        if wish.asked:
            raise _no_control(found)
        note = f"no control, which would also teach: {found}"
        log.log(logging.WARNING if wish.known else logging.INFO, "%s", note)
        return Beside(None, plan, notes=(note,))
    if control is not None and _held(plan, control) & {id(parameter) for parameter in model.parameters()}:
        raise _bad_control("an optimiser of the model's weights, whatever `optimizer` is given")
    if not isinstance(teacher, str):
        return Beside(control, taught(plan, model, teacher, CONTROL if teacher is control else OTHER))
    if teacher == "control":
        return Beside(control, taught(plan, model, control, CONTROL))
    return Beside(control, taught(plan, model, copied(model).requires_grad_(False), DENSE))


def _made(model: nn.Module, plan: Plan, wish: Wish, folder: Path | None) -> Beside | str:
    """Return a copy of a dense model as a control that teaches, or why there is none."""
    if not wish.known and not wish.asked:
        return "the training is not known; its optimizer= and schedule=, or control=copy.deepcopy(model), bring one"
    if folder is not None and (folder / "sparse.pt").exists() and not (folder / "control.pt").exists():
        return f"the run in `{folder}` began without"
    try:
        control = copied(model)
    except TrainingError as error:
        return f"{error.what} ({error.got})"
    if _held(plan, control) - {id(parameter) for parameter in control.parameters()}:
        return "`optimizer` takes other parameters than those that it is given, which both trainings would change"
    lesson = taught(plan, model, control, CONTROL)
    return "its answers cannot be compared" if lesson.taught is None else Beside(control, lesson, own=True)


def _held(plan: Plan, model: nn.Module) -> set[int]:
    """Return the identities of the parameters that the optimiser of a model would hold."""
    return {id(parameter) for group in plan.start(model, {})[0].param_groups for parameter in group["params"]}


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a dense model that shares nothing with it.

    Raises:
        TrainingError: There is none.
    """
    try:
        found = copy.deepcopy(model)
        if shared := _shared(model, found):
            raise ValueError(f"the copy would share {', '.join(shared[:3])}")
    except Exception as error:
        raise TrainingError(
            "the dense model cannot be copied",
            got=f"{type(error).__name__}: {cut(str(error), 200)}",
            wanted="a model that copy.deepcopy takes, with weights and methods of its own",
            remedy="teacher=another_copy, or teacher=None: nobody teaches then",
        ) from error
    return found


def _shared(model: nn.Module, other: nn.Module) -> list[str]:
    """Return which weights two models share, and functions in the place of `forward`, which run the first one's."""
    mine = {id(parameter) for parameter in model.parameters()}
    found = [name for name, parameter in other.named_parameters() if id(parameter) in mine]
    for (name, one), its in zip(model.named_modules(), other.modules(), strict=True):
        forward = vars(one).get("forward")
        if isinstance(forward, FunctionType) and vars(its).get("forward") is forward:
            found.append(f"{name}.forward".lstrip("."))
    return found


def wished(teacher: Any, model: nn.Module, control: Any, *, dense: bool, known: bool) -> Wish:
    """Return what a caller wishes, "auto" decided: the control of a model that is pruned here, `dense`, teaches it.

    Raises:
        TrainingError: There is no such teacher, no control that could teach, or the control is none of this model.
    """
    asked = isinstance(teacher, str) and teacher == "control"
    if is_auto(teacher):
        teacher = "control" if dense and control is not None else None
    else:
        require_teacher(teacher, model, ("auto", "dense", "control") if dense else ("auto", "control"))
    if is_auto(control) and (not dense or not isinstance(teacher, str) or teacher != "control"):
        control = None
    if control is not None and not is_auto(control):
        check(control, model, dense=dense)
    if asked and control is None:
        raise _no_control('teacher="control" without control=')
    return Wish(control, teacher, asked, known)


def _no_control(got: str) -> TrainingError:
    return TrainingError(
        "there is no control that could teach",
        got=got,
        wanted="the dense model, copied before pruning",
        remedy="control=copy.deepcopy(dense), or teacher=None: nobody teaches then",
    )


def require_teacher(teacher: object, model: nn.Module, words: tuple[str, ...] = ()) -> None:
    """Refuse a teacher that is no other model, nor nobody, nor one of those known by a word."""
    if teacher is model:
        raise TrainingError(
            "the model cannot teach itself",
            got="teacher=model",
            wanted="another model, trained for the task",
            remedy="copy.deepcopy(model) before it is pruned",
        )
    if teacher is None or isinstance(teacher, nn.Module) or (isinstance(teacher, str) and teacher in words):
        return
    named = "".join(f'"{word}", ' for word in words)
    raise TrainingError(
        "there is no such teacher",
        got=repr(teacher) if isinstance(teacher, str) else type(teacher).__name__,
        wanted=f"{named}a torch.nn.Module that is trained for the task, or None",
        remedy="teacher=None: nobody teaches then",
    )


def check(control: nn.Module, model: nn.Module, *, dense: bool = False) -> None:
    """Refuse a control that is no module, masked, shares weights with the model, or is another network.

    Beside a `dense` model, which it is to be a copy of, a warning tells of other weights.
    """
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
            raise _bad_control(f"`{name}` is {shapes[0].get(name)} there and {shapes[1].get(name)} in the model")
    theirs = dict(control.named_parameters()) if dense else {}
    other = [name for name, p in model.named_parameters() if name in theirs and not _same(p, theirs[name])]
    if other:
        log.warning("the control is no copy of the dense model: %d weights differ, such as `%s`", len(other), other[0])


def _same(one: Tensor, other: Tensor) -> bool:
    return one.device != other.device or torch.equal(one, other)


def _bad_control(got: str) -> TrainingError:
    return TrainingError(
        "the control cannot be compared with the pruned model",
        got=got,
        wanted="the dense model from before pruning, with weights of its own",
        remedy="control=copy.deepcopy(model), copied before it is pruned",
    )
