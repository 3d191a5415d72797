"""`finish`: a copy of a model that is trained both ways, which has no handle, is made plain and masked."""

from __future__ import annotations

from typing import cast

from torch import nn

from twofour import masks
from twofour.errors import TrainingError
from twofour.layers import CARRIED, PrunableWeight, attached, describe_schemes, is_masked, kind_of, take_off
from twofour.layers.modules import parameters_of
from twofour.training import fused
from twofour.training.both_ways.first_masks import PATTERN
from twofour.training.both_ways.handle import TITLE, mask_of
from twofour.training.both_ways.kept_linear import put_places, require_whole
from twofour.training.both_ways.watched import STATES
from twofour.training.sparse_linear import LinearProducts


def finish(model: nn.Module) -> nn.Module:
    """Make a copy of a model that is trained both ways plain and masked, as its handle's `finish` would; returns it.

    A copy (`copy.deepcopy` of the best model so far, say) or an unpickled model has no handle. Layers whose masks were
    not in force yet are dense again. The copy's optimisers go on with dense parameters.

    Raises:
        TrainingError: Nothing is trained both ways, a handle is alive, or a layer has lost its weight.
    """
    found = [(name, module) for name, module in model.named_modules() if attached(module) == TITLE]
    if not found or describe_schemes(model):
        raise TrainingError(
            "the model is no copy of one that is trained both ways",
            got=describe_schemes(model) or "nothing attached",
            wanted="a copy, or an unpickled model, without a handle",
            remedy="call finish() of the handle that attach returned",
        )
    layers = [(name, module) for name, module in found if isinstance(module.__dict__[CARRIED], LinearProducts)]
    for name, module in layers:
        if mask_of(module.__dict__[CARRIED]).places is not None:
            require_whole(module, name)
    for activation in {module for _, module in found} - {module for _, module in layers}:
        take_off(activation)
    chosen = []
    for name, module in layers:
        masked = mask_of(module.__dict__[CARRIED])
        keep, held = masked.mask(), masked.places is not None
        parameter = cast(nn.Parameter, parameters_of(module)["weight"])
        take_off(module)
        if held:
            STATES.release([parameter])
            put_places(parameter, masked, None)
        if keep is not None and not is_masked(module):
            kind = kind_of(module)
            assert kind is not None, name
            weight = PrunableWeight(f"{name}.weight".lstrip("."), name, module, "weight", kind)
            chosen.append((weight, keep.view(parameter.shape), PATTERN))
    fused.take_off(model, TITLE)
    masks.attach_all(chosen)
    masks.enforce(model)
    return model
