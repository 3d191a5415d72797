"""The dense model beside the sparse one: a control that has the same training, and whoever teaches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from twofour import masks
from twofour.errors import TrainingError, cut
from twofour.training.checkpoint import NOBODY
from twofour.training.copies import copied, shared
from twofour.training.defaults import is_auto
from twofour.training.distillation import Taught
from twofour.training.lesson import asked, taught, teaching
from twofour.training.plan import Plan
from twofour.training.result import CONTROL, DENSE, OTHER

log = logging.getLogger("twofour.training")


@dataclass(frozen=True)
class Wish:
    """What a caller wants beside the model: "auto" is a control that is copied from it and teaches.

    `asked` tells whether the control must teach, `known` whether the caller told what the training was, `left` whether
    the control was left open.
    """

    control: nn.Module | Literal["auto"] | None
    teacher: nn.Module | str | None
    asked: bool
    known: bool
    left: bool


@dataclass(frozen=True)
class Beside:
    """The models beside the one that becomes sparse: a control, a copy of the caller's `own` or not, and the teacher.

    The `plan` is that of the sparse run, with its teacher; `notes` say why there is no control where one is expected.
    """

    control: nn.Module | None
    plan: Plan
    own: bool = False
    notes: tuple[str, ...] = ()


def beside(model: nn.Module, plan: Plan, wish: Wish, begun: str | None) -> Beside:
    """Return the control and the plan of a sparse run that is taught; a dense model is copied for them, before pruning.

    `begun` tells who teaches in a run that goes on.

    Raises:
        TrainingError: The teacher answers in another shape, the model cannot be copied to teach, or the optimiser of
            the control would hold other parameters than the model's does.
    """
    control, teacher = wish.control, wish.teacher
    if isinstance(control, nn.Module) and (wrong := _told_apart(plan, model, control)):
        raise _bad_control(wrong)
    if isinstance(plan.loader, Taught):  # nobody else teaches
        return Beside(None if isinstance(control, str) else control, plan)
    if isinstance(control, str):
        found = _made(model, plan, wish, begun)
        if isinstance(found, Beside):
            return found
        if wish.asked:
            raise _no_control(found)
        note = f"no control, which would also teach: {found}"
        log.log(logging.WARNING if wish.known else logging.INFO, "%s", note)
        return Beside(None, plan, notes=(note,))
    if not isinstance(teacher, str):
        return Beside(control, taught(plan, model, teacher, CONTROL if teacher is control else OTHER))
    if teacher == "control":
        return Beside(control, taught(plan, model, control, CONTROL))
    if (question := asked(plan, model, DENSE)) is None:
        return Beside(control, plan)
    return Beside(control, teaching(plan, copied(model, question).requires_grad_(False), DENSE, question))


def _made(model: nn.Module, plan: Plan, wish: Wish, begun: str | None) -> Beside | str:
    """Return a copy of a dense model as a control that teaches, or why there is none."""
    if not wish.known and not wish.asked:
        return "the training is not known; its optimizer= and schedule=, or control=copy.deepcopy(model), bring one"
    if begun == NOBODY:
        return "the run that `checkpoint` holds began without"
    if (question := asked(plan, model, CONTROL)) is None:
        return "its answers cannot be compared"
    try:
        control = copied(model, question)
    except TrainingError as error:
        return f"{error.what} ({error.got})"
    wrong = _told_apart(plan, model, control, own=True)
    return wrong or Beside(control, teaching(plan, control, CONTROL, question), own=True)


def _told_apart(plan: Plan, model: nn.Module, control: nn.Module, *, own: bool = False) -> str:
    """Return how the optimiser of a control holds other parameters than the model's does; "" where it does not.

    That of our `own` copy has the same settings too, and holds no parameters of others. One of the caller's may have
    other weights frozen, which are not compared.
    """
    trained = [{n for n, p in m.named_parameters() if p.requires_grad or own} for m in (model, control)]
    frozen = trained[0] ^ trained[1]
    mine = _held(plan, model, own, frozen)
    try:
        theirs = _held(plan, control, own, frozen)
    except Exception as error:
        return f"{_APART} ({type(error).__name__}: {cut(str(error), 200)})"
    strangers = any(None in names for names, _ in theirs)
    if own and strangers:
        return "`optimizer` takes other parameters than those that it is given, which both trainings would change"
    if mine == theirs:
        return ""
    return "an optimiser of the model's weights, whatever `optimizer` is given" if strangers else _APART


_APART = "`optimizer` tells this model's parameters from the copy's"


def _held(plan: Plan, of: nn.Module, settings: bool, but: set[str]) -> list[tuple[set[str | None], dict[str, Any]]]:
    """Return the names of the parameters in each group of an optimiser, None for others, and its `settings`."""
    names = {id(parameter): name for name, parameter in of.named_parameters()}
    return [
        (
            {names.get(id(parameter)) for parameter in group["params"]} - but,
            {key: value for key, value in group.items() if settings and isinstance(value, float)},
        )
        for group in plan.start(of, {})[0].param_groups
    ]


@contextmanager
def watched(model: nn.Module) -> Iterator[list[str]]:
    """While the control of a model is trained, drop gradients that reach the model; the first is told of and noted."""
    notes = list[str]()

    def drop(parameter: Tensor) -> None:
        parameter.grad = None
        if not notes:
            notes.append("`loss`, or the control itself, reads weights of the model, not of the control")
            log.warning("%s", notes[0])

    hooks = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters() if p.requires_grad]
    try:
        yield notes
    finally:
        for hook in hooks:
            hook.remove()


def wished(teacher: Any, model: nn.Module, control: Any, *, dense: bool, known: bool) -> Wish:
    """Return what a caller wishes, "auto" decided: the control of a model that is pruned here, `dense`, teaches it.

    Raises:
        TrainingError: There is no such teacher, no control that could teach, or the control is none of this model.
    """
    asked, left = isinstance(teacher, str) and teacher == "control", is_auto(control)
    if is_auto(teacher):
        teacher = "control" if dense and control is not None else None
    else:
        require_teacher(teacher, model, ("auto", "dense", "control") if dense else ("auto", "control"))
    if is_auto(control) and (not dense or not isinstance(teacher, str) or teacher != "control"):
        control = None
    if control is not None and not is_auto(control):
        require_control(control, model, dense=dense)
    if asked and control is None:
        raise _no_control('teacher="control" without control=')
    return Wish(control, teacher, asked, known, left)


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


def require_control(control: nn.Module, model: nn.Module, *, dense: bool = False) -> None:
    """Refuse a control that is no module, masked, shares weights with the model, or is another network.

    Beside a `dense` model, which it is to be a copy of, a warning tells of other weights.
    """
    if not isinstance(control, nn.Module):
        raise _bad_control(type(control).__name__)
    if masks.of(control):
        got = "the pruned model itself" if control is model else f"{len(masks.of(control))} masked weights"
        raise _bad_control(got)
    weights = dict(control.named_parameters()).keys()
    if same := [name for name in shared(model, control) if name in weights]:
        raise _bad_control(f"{len(same)} weights shared with the pruned model: {', '.join(same[:3])}")
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
