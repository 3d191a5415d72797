"""The walk over a model: names the weights that can be pruned and says why the others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from twofour.layers.axis import Reduction
from twofour.layers.globs import parse_globs, require_eligibility, require_matches, require_module
from twofour.layers.modules import named_modules, parameters_of
from twofour.layers.reasons import Place, reason
from twofour.layers.weight import PrunableWeight


@dataclass(frozen=True)
class Skipped:
    """A parameter of two or more axes that stays dense, and the reason."""

    name: str
    layer: str
    reason: str


@dataclass(frozen=True)
class Walk:
    """What a walk over a model found, in the model's own order."""

    weights: tuple[PrunableWeight, ...]
    skipped: tuple[Skipped, ...]

    @property
    def by_name(self) -> dict[str, PrunableWeight]:
        """The weights under each of their names."""
        return {name: weight for weight in self.weights for name in weight.names}


def walk(
    model: nn.Module,
    *,
    skip: str | Sequence[str] = (),
    eligibility: str = "asp",
    tied: str | Sequence[str] = (),
    empty: bool = False,
) -> Walk:
    """Find the weights of `model` that can be pruned; each other parameter with two or more axes gets a reason.

    Args:
        model: Any module; a single layer is a model too.
        skip: Globs of layers to leave dense, matched as `matches` does.
        eligibility: "asp" takes a weight only if its rows are a multiple of 8 and its reduction axis one of 16 (apex
            asp.py), which leaves RGB stems, depth-wise convolutions and odd heads dense; "any" leaves it to the
            pattern's group.
        tied: Globs of whole layer names whose weight is taken although an embedding looks up its rows ("*": every one).
        empty: Take weights on the meta device too: their values are elsewhere, in a file.

    Raises:
        LayerError: `model` is no module, `eligibility` is unknown, `skip` is no glob or globs, or one matches no layer.
    """
    require_eligibility(eligibility)
    globs, asked = parse_globs(skip), parse_globs(tied, "tied")
    require_matches(model, globs, "a glob in `skip`")
    places_of = _places(model)
    overlapping = _shared_memory(places_of)
    weights: list[PrunableWeight] = []
    skipped: list[Skipped] = []
    for key, places in places_of.items():
        # A head that is tied to an embedding is the layer to prune, whichever comes first in the model.
        first = next((place for place in places if not place.embeds), places[0])
        others = [place for place in places if place is not first]
        parameter = parameters_of(first.module)[first.attribute]
        assert parameter is not None
        why = reason([first, *others], parameter, globs, eligibility, asked, empty) or overlapping.get(key)
        if why is None:
            assert first.kind is not None, first
            aliases = tuple(place.name for place in others)
            shared = tuple((place.module, place.attribute, place.name) for place in others if not place.embeds)
            at = (first.name, first.layer, first.module, first.attribute)
            weights.append(PrunableWeight(*at, first.kind, aliases, shared))
        elif is_lazy(parameter) or parameter.ndim >= 2:
            skipped.append(Skipped(first.name, first.layer, why))
    return Walk(tuple(weights), tuple(skipped))


def reduction_axes(model: nn.Module) -> dict[str, Reduction]:
    """Return the reduction axis of every parameter of a known kind, by every name it has, whatever its values are.

    Raises:
        LayerError: `model` is no module.
    """
    require_module(model)
    places = [place for found in _places(model).values() for place in found]
    return {p.name: p.kind.reduction(p.module) for p in places if p.kind and p.kind.holds(p.attribute)}


def _places(model: nn.Module) -> dict[int, list[Place]]:
    """Group the places of each parameter by the parameter's identity, so that a tied one is handled once."""
    places: dict[int, list[Place]] = {}
    attentions: dict[str, nn.Module] = {}
    for layer, module in named_modules(model, again=True):
        around = next(
            (found for name, found in attentions.items() if layer.startswith(f"{name}." if name else "")), None
        )
        if isinstance(module, nn.MultiheadAttention):
            attentions[layer] = module
        for attribute, parameter in parameters_of(module).items():
            if parameter is not None:
                name = f"{layer}.{attribute}" if layer else attribute
                places.setdefault(id(parameter), []).append(Place(name, layer, module, attribute, around))
    return places


def _shared_memory(places_of: dict[int, list[Place]]) -> dict[int, str]:
    """Find parameters that are different objects over the same memory: one mask could not hold for both."""
    seen: dict[int, tuple[int, str]] = {}
    reasons: dict[int, str] = {}
    for key, (first, *_) in places_of.items():
        parameter = parameters_of(first.module)[first.attribute]
        if type(parameter) is not nn.Parameter or parameter.layout != torch.strided or parameter.numel() == 0:
            continue
        address = 0 if parameter.is_meta else parameter.data_ptr()
        if not address:
            continue
        other, name = seen.setdefault(address, (key, first.name))
        if other != key:
            reasons[key] = f"shares memory with `{name}` without being the same Parameter"
            reasons[other] = f"shares memory with `{first.name}` without being the same Parameter"
    return reasons
