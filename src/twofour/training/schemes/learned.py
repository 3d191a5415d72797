"""What a training has learned of a model's proportions, and the small model that it leaves."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from twofour.errors import TrainingError
from twofour.structure import shrink
from twofour.structure.coupling.group import some
from twofour.structure.shrink import Cut
from twofour.structure.shrink.absorb import left_open
from twofour.training.schemes.gated import handing_on

_LEARNED = "_twofour_learned_cut"

_log = logging.getLogger("twofour.training")


@dataclass(frozen=True)
class Learned:
    """What a training has learned of a model's proportions.

    Attributes:
        plan: What stays.
        widths: Channels of each group before and after.
        layers: Blocks that go.
    """

    plan: Cut
    widths: Mapping[str, tuple[int, int]]
    layers: tuple[str, ...]


def leave(model: nn.Module, found: Learned) -> None:
    """Note with a model what was learned in it."""
    model.__dict__[_LEARNED] = found


def learned(model: nn.Module) -> Learned:
    """Return the proportions that a training with gates has left in a model.

    Raises:
        TrainingError: None has.
    """
    found = model.__dict__.get(_LEARNED)
    if not isinstance(found, Learned):
        raise TrainingError(
            "the model has no learned proportions",
            got=f"a {type(model).__name__} that no gates were trained in, or not to their end",
            wanted="a model after gates.attach(model, ...).finish() or finetune(..., scheme=gates.during(example))",
            remedy="call finish() of the gates at the end of their training",
        )
    return found


def cut(model: nn.Module, example: Any) -> nn.Module:
    """Return the small model that gates have left: the closed channels and blocks go, the rest is what it was.

    Closed channels are constant; biases take their constants up. Layers that pad with zeros differ at the borders.

    Args:
        model: A model whose gates are finished; it stays as it is.
        example: Input of one forward pass, of two samples or more, so that constants show.

    Raises:
        TrainingError: No gates were trained in the model, or what goes is not closed: the model was trained on since,
            or the example is too short to show constants.
        ShrinkError: The model was changed since, does not run on the example, or the small one would compute something
            else on it than the large one with zeros in place of what goes.
    """
    plan = learned(model).plan
    if still_open := left_open(model, plan, example):
        raise _not_closed(still_open, f"{some(still_open)}, which read something else than constants from what goes")
    identities = handing_on(model, plan.layers, example) if plan.layers else []
    if changing := [name for name in plan.layers if name not in identities]:
        raise _not_closed(changing, f"{some(changing)}, which hands on something else than it gets")
    shrink.verify(model, plan, example)
    small, bordered = shrink.absorbed(model, plan, example)
    small.__dict__.pop(_LEARNED, None)
    if (reason := shrink.configure(small)) and hasattr(small, "config"):
        _log.warning("no configuration says the sizes of the small model, twofour.load loads it: %s", reason)
    if bordered:
        _log.info("constants of closed channels are exact but for the borders of %s", ", ".join(bordered))
    return small


def _not_closed(names: Sequence[str], got: str) -> TrainingError:
    return TrainingError(
        "what goes is not closed",
        got=got,
        wanted="the model as `finish` left it, and an example of two samples or more, which show what is constant",
        remedy="cut first and train the small model on",
    ).for_layer(names[0])
