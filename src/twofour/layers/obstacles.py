"""What keeps a layer from being replaced: each caller says which of it he can live with."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from twofour.layers.attachments import attached
from twofour.layers.kinds import kind_of
from twofour.layers.modules import table
from twofour.layers.reasons import own_forward

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def obstacles(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (kind, reason) of each: "attached", "forward", "parametrised", "hooks"; a module of no kind has none."""
    if (kind := kind_of(module)) is None:
        return
    if over := attached(module):
        yield "attached", f"{over} is attached: call remove() of its handle first"
    if own := own_forward(module, kind.base):
        yield "forward", own
    if torch.nn.utils.parametrize.is_parametrized(module):
        yield "parametrised", "its weight is parametrised"
    if any(table(module, hooks) for hooks in _HOOKS):
        yield "hooks", "it has hooks, which a replacement would lose"


def obstacle(module: nn.Module, accepted: Collection[str] = ()) -> str | None:
    """Return the reason of the first obstacle whose kind is not accepted, None where there is none."""
    return next((reason for kind, reason in obstacles(module) if kind not in accepted), None)
