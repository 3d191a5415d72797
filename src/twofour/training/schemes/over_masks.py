"""Schemes that keep a masked model's masks: which weights they take, and how the masks step aside and come back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from twofour import masks
from twofour.errors import TrainingError, cut
from twofour.layers import Attachment
from twofour.masks import Mask
from twofour.training.schemes.slots import Slot, parametrise_all, tied

_log = logging.getLogger("twofour.training")

TIED = "it is tied to another weight, which would go without"


class OverMasks(Attachment):
    """Parametrisations of masked weights, one for each mask in `found`, which keep its zeros."""

    def __init__(
        self, model: nn.Module, title: str, found: Mapping[str, Mask], parametrisations: Sequence[nn.Module]
    ) -> None:
        super().__init__(model)
        self.layers = tuple(found)
        self._masks = masks.state_dict(model)
        self._slots = [Slot(mask.module, mask.attribute) for mask in found.values()]
        others = {name: saved for name, saved in self._masks.items() if name not in found}
        masks.detach(model)  # a parametrised weight has no parameter of its own for a mask to hold
        try:
            parametrise_all(self._slots, parametrisations)
        except BaseException:
            masks.load_state_dict(model, self._masks)
            raise
        if others:
            masks.load_state_dict(model, others)
        self._begin(title, [mask.module for mask in found.values()])

    def _take_off(self, *, parametrised: bool) -> nn.Module:
        """Make the weights parameters again, as they were computed last or as they are underneath, and masked."""
        self._end()
        for slot in self._slots:
            slot.restore(parametrised=parametrised)
        masks.detach(self.model)
        masks.load_state_dict(self.model, self._masks)
        return self.model


def fitting(
    model: nn.Module, layers: object, unfit: Callable[[Mask], str | None], *, verb: str, wanted: str
) -> dict[str, Mask]:
    """Return the masks of the layers that a glob names; those tied, or for which `unfit` has a reason, get a log line.

    Raises:
        TrainingError: `layers` is no text, or nothing is left.
    """
    if not isinstance(layers, str):
        raise TrainingError(
            "`layers` is no glob",
            got=cut(repr(layers), 80),
            wanted='one text, such as "encoder.*"',
            remedy='leave it out for every masked layer: "*"',
        )
    found, left, shared = dict[str, Mask](), dict[str, str](), tied(model)
    for name, mask in masks.of(model).items():
        if not fnmatchcase(mask.layer, layers):
            continue
        if reason := TIED if id(mask.parameter) in shared else unfit(mask):
            left[name] = reason
            _log.info("nothing to %s in `%s`: %s", verb, name, reason)
        else:
            found[name] = mask
    if not found:
        raise TrainingError(
            f"there is nothing to {verb}",
            reasons=[f"`{name}`: {reason}" for name, reason in left.items()],
            got=f"{len(masks.of(model))} masks, layers={layers!r}",
            wanted=f"a model from twofour.prune with {wanted} that fits the glob and is not tied",
            remedy='twofour.prune(model, "2:4") first; untie a tied weight before: '
            "layer.weight = torch.nn.Parameter(layer.weight.detach().clone())",
        )
    return found
