"""Which groups of channels may be cut, and why the others stay whole though they could be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from twofour import calls
from twofour.errors import ShrinkError
from twofour.shrinking.uniform import sayable
from twofour.structure import shrink as structure
from twofour.structure.coupling.group import some
from twofour.structure.shrink import Channels, Cuttable, Uncut

Streams = bool | Literal["auto"]

STREAM = "a residual stream: streams=True cuts it"
NORMALISED = "a normalisation runs along it, over what stays: streams=True cuts it, to compute something else then"
"""Why channels stay whole that nobody has asked for."""


def cuttable(
    model: nn.Module, found: Channels, streams: Streams, uniform: bool
) -> tuple[list[Cuttable], tuple[Uncut, ...]]:
    """Return the groups that may be cut, and those that stay whole: streams, and what a configuration cannot say.

    Raises:
        ShrinkError: There is none.
    """
    chosen = [g for g in found.groups if streams is True or (g.exact and (streams == "auto" or not g.group.stream))]
    held = tuple(_whole(group, STREAM if group.exact else NORMALISED) for group in found.groups if group not in chosen)
    chosen, unsaid = sayable(model, found, chosen) if uniform and chosen else (chosen, ())
    unsaid = held + unsaid
    if chosen:
        return chosen, unsaid
    raise ShrinkError(
        "nothing can be cut",
        reasons=[str(uncut) for uncut in found.uncut + unsaid],
        got=f"{len(found.groups)} groups of channels, all residual streams or normalised"
        if found.groups
        else "no group",
        wanted="channels between two layers",
        remedy="streams=True cuts residual streams too",
    )


def channels_without(model: nn.Module, twin: nn.Module, layers: Sequence[str], example: Any) -> Channels:
    """Return the channels of a copy of a model that lacks some layers.

    Raises:
        ShrinkError: It does not run on the example, or cannot be captured; where the model runs, the layers are named.
    """
    try:
        return structure.channels(twin, example)
    except ShrinkError as error:
        if layers and _runs(model, example):
            several = "layers" if len(layers) > 1 else "layer"
            error.what = f"{error.what}, without {several} {some([f'`{name}`' for name in layers])}"
            error.remedy = "leave it in `layers` out: what follows takes more or something else than what it gets"
        raise


@torch.no_grad()
def _runs(model: nn.Module, example: Any) -> bool:
    try:
        with calls.evaluating(model), calls.without_cache(model):
            calls.Example.of(example).run(model)
    except Exception:  # whatever a forward of anybody's raises
        return False
    return True


def of_several_widths(
    groups: Sequence[Cuttable], found: Channels, widths: Callable[[Cuttable], tuple[int, ...]]
) -> tuple[list[Cuttable], tuple[Uncut, ...]]:
    """Return the groups that may have several widths, and those that stay whole since they may not."""
    single = [group for group in groups if len(widths(group)) < 2]
    uncut = [_whole(group, "its own is the only width that `multiple` and `least` allow") for group in single]
    left = [group for group in groups if group not in single]
    for unit in found.bound:
        others = [group for group in unit if group not in left or widths(group) != widths(unit[0])]
        if others:
            reason = f"it has to get the width of `{others[0].name}`, which stays whole or may have other widths"
            uncut += [_whole(group, reason) for group in unit if group in left]
            left = [group for group in left if group not in unit]
    return left, tuple(uncut)


def _whole(group: Cuttable, reason: str) -> Uncut:
    return Uncut(tuple(dict.fromkeys(place.name for place in group.group.places)), group.size, reason)
