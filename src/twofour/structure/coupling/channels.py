"""channels: every set of channels of a model that can be cut, wherever it stands; `trace` knows those that may move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from twofour.layers import PrunableWeight
from twofour.structure.coupling.axes import Atom, Axis, Coordinates, factors, leaves
from twofour.structure.coupling.axes import size as size_of
from twofour.structure.coupling.group import Coupling, Extent, Group, Place, Refusal
from twofour.structure.coupling.tracer import Tracer, coordinates_or_none, followed

Found = dict[str, list[dict[Atom, Coordinates]]]
"""Name of a tensor -> for each of its axes where the channels of each atom stand."""

NO_CHANNELS = (
    "places of a convolution",
    "places of a pooling",
    "rows of an embedding",
    "gates",
    "directions",
    "layers",
    "a stack of tensors",
)
"""Why axes are fixed that nobody would call channels."""


def channels(model: nn.Module, example: Mapping[str, Any], weights: Sequence[PrunableWeight]) -> Coupling:
    """Find all channels that stand along axes of a model's parameters, and where each of them stands.

    More than `trace` gives: heads, groups of a convolution, and channels that no weight sums over. A group has one
    block: what is cut is cut from every head or group of a convolution alike, since their sizes stay equal.

    Args:
        model: Any module that torch.export can follow; it is not changed.
        example: Values of the parameters of its forward, as from `capture.arguments`.
        weights: The weights that count as consumers of channels.

    Returns:
        Groups and extents; refused are channels of an input, an output, or an operator that has no rule.

    Raises:
        CompileError: The model cannot be captured.
    """
    tracer = followed(model, example)
    tracer.settle()
    found: Found = {name: [coordinates_or_none(axis) for axis in axes] for name, axes in tracer.weights.items()}
    places: dict[Atom, list[Place]] = {}
    for name, axes in found.items():
        for axis, here in enumerate(axes):
            for leaf, own in here.items():
                places.setdefault(leaf, []).append(Place(name, axis, own.index, own.stride))
    rigid = {leaf: reason for axis, reason in reversed(tracer.notes.rigid) for leaf in leaves(axis)}
    parameters = set(tracer.parameters)
    places = {leaf: held for leaf, held in places.items() if any(place.name in parameters for place in held)}
    refused = [
        Refusal(_names(held), leaf.size, leaf.fixed or rigid[leaf])
        for leaf, held in places.items()
        if (leaf.fixed or leaf in rigid) and leaf.fixed not in NO_CHANNELS
    ]
    free = [leaf for leaf in places if not leaf.fixed and leaf not in rigid]
    groups = _groups(tracer, free, places, found, weights)
    return Coupling(tuple(groups), tuple(refused), tracer.unused, tuple(_extents(tracer, free)))


def _names(places: Sequence[Place]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(place.name for place in places))


def _groups(
    tracer: Tracer,
    free: Sequence[Atom],
    places: Mapping[Atom, Sequence[Place]],
    found: Found,
    weights: Sequence[PrunableWeight],
) -> list[Group]:
    consumers: dict[Atom, list[str]] = {}
    for weight in weights:
        name = next((name for name in weight.names if name in found), None)  # a tied weight has one name in the trace
        if name is not None:
            for leaf in found[name][weight.axis.axis]:
                consumers.setdefault(leaf, []).append(name)
    normalised = {leaf: name for axis, name in tracer.notes.normalised for leaf in leaves(axis)}
    streams = {leaf for axis in tracer.streams for leaf in leaves(axis)}
    return [
        Group(
            leaf.size,
            1,
            tuple(places[leaf]),
            tuple(consumers.get(leaf, ())),
            leaf in streams,
            normalised.get(leaf, ""),
        )
        for leaf in free
    ]


def _extents(tracer: Tracer, free: Sequence[Atom]) -> list[Extent]:
    """Return each axis of each module that holds channels of a group, once."""
    number = {leaf: index for index, leaf in enumerate(free)}
    counted = [(module, axis, True) for module, axis in tracer.notes.counted]
    known: dict[tuple[Any, ...], Extent] = {}
    for module, axis, said in [*((m, a, False) for m, a in tracer.extents), *counted]:
        key = (module, said, *map(id, factors(axis)))
        if key not in known and any(leaf in number for leaf in leaves(axis)):
            known[key] = Extent(module, size_of(axis), _index(axis, number), said)
    return [extent for extent in known.values() if extent.index]


def _index(axis: Axis, number: Mapping[Atom, int]) -> dict[int, torch.Tensor]:
    return {number[leaf]: own.index for leaf, own in coordinates_or_none(axis).items() if leaf in number}
