"""Cuts in files: a model that was shrunk says what stays of the large one, and loading cuts a large one alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from twofour.errors import FormatError, ShrinkError
from twofour.export.file import Contents
from twofour.export.fit import misfit, with_ties
from twofour.structure.shrink import Cut, cuts_of
from twofour.structure.shrink.cut import MOST_KEPT
from twofour.structure.shrink.layers import renamed
from twofour.structure.shrink.sizes import number
from twofour.structure.shrink.surgery import apply, put_back, require_fit

CUTS = "cuts"
"""Key of the settings: the cuts that made the model, in their order."""


def described(model: nn.Module) -> list[dict[str, Any]]:
    """Return what `settings` says of a model's cuts.

    Raises:
        FormatError: They hold more than a reader takes.
    """
    plans = cuts_of(model)
    if (positions := sum(plan.positions for plan in plans)) > MOST_KEPT:
        raise FormatError(
            "the cuts of the model cannot be stored",
            got=f"{positions:,} positions that stay, in {len(plans)} cuts",
            wanted=f"at most {MOST_KEPT:,}",
            remedy="cut the large model once, to its last sizes",
            code="settings-cuts",
        )
    return [plan.to_dict() for plan in plans]


def parse_cuts(path: Any, said: object) -> tuple[Cut, ...]:
    """Return the cuts that the settings of a file hold, none where they hold none.

    Raises:
        FormatError: What they hold is no list of cuts.
    """
    if not said:
        return ()
    try:
        if not isinstance(said, list):
            raise ShrinkError("the cuts are no list", got=type(said).__name__)
        plans: list[Cut] = []
        for one in said:
            plans.append(Cut.from_dict(one, MOST_KEPT - sum(plan.positions for plan in plans)))
        return tuple(plans)
    except ShrinkError as error:
        raise FormatError(
            f"the file holds a cut that cannot be read: {error.what}",
            got=f"{path}: {error.got}",
            wanted=error.wanted,
            remedy="write the file again with twofour.save",
            code="settings-cuts",
        ) from error


def missing_cuts(path: Any, model: nn.Module, contents: Contents) -> tuple[Cut, ...]:
    """Return the cuts that a model lacks to be the file's.

    A model may be small by its own configuration, or because it was cut before; then what it has to be cut like is
    what the file holds beyond its own cuts. Where all of its tensors have the file's shapes it is taken for small,
    unless it has a layer without tensors or a number that the cuts took away.

    Raises:
        FormatError: The cuts cannot be read.
    """
    plans = parse_cuts(path, contents.settings.get(CUTS))
    own = cuts_of(model)
    if plans == own or (_has_shapes(model, contents) and not _shows_uncut(model, plans)):
        return ()
    return plans[len(own) :] if plans[: len(own)] == own else plans


def _has_shapes(model: nn.Module, contents: Contents) -> bool:
    contents = with_ties(model, contents)
    shapes = {name: tuple(tensor.shape) for name, tensor in contents.plain.items()}
    shapes |= {name: tuple(weight.header.shape) for name, weight in contents.packed.items()}
    state = {name: tuple(t.shape) for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    whole = state.keys() <= shapes.keys() | contents.aliases.keys()
    return whole and all(state.get(name, shape) == shape for name, shape in shapes.items())


def _shows_uncut(model: nn.Module, plans: Sequence[Cut]) -> bool:
    """Whether a model whose shapes show no cut has a layer that would have gone, or a number as it was before."""
    modules = dict(model.named_modules())
    numbers: dict[tuple[str, str], int] = {}
    for plan in plans:
        for name in plan.layers:
            if name in modules and not [*modules[name].parameters(), *modules[name].buffers()]:
                return True
        numbers |= {(a.module, a.name): a.after for a in plan.attributes}
        moved = {(renamed(module, plan.layers), name): after for (module, name), after in numbers.items()}
        numbers = {(module, name): after for (module, name), after in moved.items() if module is not None}
    return any(
        module in modules and number(modules[module], name) != after for (module, name), after in numbers.items()
    )


def with_cuts(path: Any, model: nn.Module, contents: Contents) -> nn.Module:
    """Return a model that is cut as a file's was: a copy, or the model itself where nothing has to be cut.

    Raises:
        FormatError: A cut cannot be read, or is not one of this model.
    """
    plans = missing_cuts(path, model, contents)
    if not plans:
        return model
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for plan in plans:
        _cut(path, twin, plan)
    return twin


def cut_given(path: Any, model: nn.Module, contents: Contents) -> Callable[[], None]:
    """Cut a model itself as a file's was; return what puts it back.

    Raises:
        FormatError: A cut cannot be read, or is not one of this model; then it is as it was.
    """
    undo: list[Callable[[], None]] = []
    try:
        for plan in missing_cuts(path, model, contents):
            undo.append(_cut(path, model, plan))
    except BaseException:
        put_back(undo)
        raise
    return lambda: put_back(undo)


def _cut(path: Any, model: nn.Module, plan: Cut) -> Callable[[], None]:
    try:
        require_fit(model, plan)
    except ShrinkError as error:
        got = f"`{error.layer}`: {error.got}" if error.layer else str(error.got)
        raise misfit("model-cut", path, got, "a cut of the file") from error
    return apply(model, plan)
