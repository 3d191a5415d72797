"""Which channels a configuration can say: one number for all layers has to tell the small model's sizes."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence

from torch import Tensor, nn

from twofour.errors import ShrinkError
from twofour.structure import shrink as structure
from twofour.structure.shrink import Channels, Cuttable, Uncut


def sayable(model: nn.Module, found: Channels, groups: Sequence[Cuttable]) -> tuple[list[Cuttable], tuple[Uncut, ...]]:
    """Return the groups whose sizes the model's configuration can say, and those that stay whole since it cannot.

    The same channels of all layers are halved on a copy without values, kind by kind, then those of one size together.
    Of a model without a configuration all groups are returned.

    Args:
        model: The large model; it is not changed.
        found: Its channels.
        groups: Those that are to be cut.
    """
    skeleton = _skeleton(model)
    if structure.configure(copy.deepcopy(skeleton)):
        return list(groups), ()
    said: list[Cuttable] = []
    unsaid: list[Uncut] = []
    alone: dict[Hashable, list[Cuttable]] = {}
    for group in groups:
        alone.setdefault(group.kind, []).append(group)
    together: dict[int, list[Cuttable]] = {}
    for of_kind in alone.values():
        if _refusal(skeleton, found, of_kind):
            together.setdefault(of_kind[0].size, []).extend(of_kind)
        else:
            said += of_kind
    for of_size in together.values():  # one number may stand for several kinds: T5's, for encoder and decoder
        reason = _refusal(skeleton, found, of_size)
        said += [] if reason else of_size
        unsaid += [Uncut((group.group.places[0].name,), group.size, reason) for group in of_size if reason]
    return sorted(said, key=lambda group: group.number), tuple(unsaid)


def _skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of a model that has its shapes and no values."""
    empty: dict[int, Tensor] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        empty[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(model, empty)


def _refusal(model: nn.Module, found: Channels, groups: Sequence[Cuttable]) -> str:
    try:
        small = structure.cut(model, found.plan({group.name: range(max(1, group.size // 2)) for group in groups}))
    except ShrinkError:  # they are cut with others alone: what comes of it is said in the report
        return ""
    reason = structure.configure(small)
    return f"{reason}, and uniform=True wants one that does" if reason else ""
