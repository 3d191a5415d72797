"""Channels: what of a model can be cut, found by tracing and held to a trial; and the plan of a cut from what stays."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.errors import ShrinkError, cut
from twofour.structure.coupling import Extent, Group
from twofour.structure.coupling.group import some
from twofour.structure.shrink.cut import AttributeCut, Cut, joined


@dataclass(frozen=True, eq=False)
class Cuttable:
    """Channels that can be cut, each with all that it holds.

    Attributes:
        name: Tensor, axis and, where several stand along one axis, which of them: "layer1.0.conv1.weight:0".
        group: The channels and all their places.
        number: Number of the group in its `Channels`, as `Extent.index` counts.
        attributes: (module, attribute) of the whole numbers that the forwards take the size from.
    """

    name: str
    group: Group
    number: int
    attributes: tuple[tuple[str, str], ...] = ()

    @property
    def size(self) -> int:
        """How many channels there are."""
        return self.group.size

    @property
    def kind(self) -> Hashable:
        """What the same channels of all layers have in common: all of their names but the numbers of layers."""
        return self.exact, self.size, re.sub(r"\.\d+(?=\.)", ".N", self.name), len(self.group.places)

    @property
    def exact(self) -> bool:
        """Whether the model without some channels computes what it would with zeros in their places."""
        return not self.group.normalised


@dataclass(frozen=True)
class Uncut:
    """Channels that stay whole.

    Attributes:
        names: Tensors that hold them.
        size: How many.
        reason: Why.
    """

    names: tuple[str, ...]
    size: int
    reason: str

    def __str__(self) -> str:
        return f"{some(self.names)} ({self.size} channels) stays whole: {self.reason}"


@dataclass(frozen=True, eq=False)
class Channels:
    """What of a model can be cut, and what cannot.

    Attributes:
        groups: Channels that can be cut, in the model's order.
        uncut: Those that stay whole, with the reason.
        extents: Axes that the modules' forwards handle.
        numbers: Whole numbers that forwards take sizes from, by module and attribute.
        shapes: Shape of each parameter of the model by its first name.
        unused: Parameters that the example's forward did not use: they stay whole.
        tied: Names of groups that have to get one size though no number counts them: halves of a `chunk`.
    """

    groups: tuple[Cuttable, ...]
    uncut: tuple[Uncut, ...]
    extents: tuple[Extent, ...]
    numbers: Mapping[tuple[str, str], int]
    shapes: Mapping[str, tuple[int, ...]]
    unused: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()

    @property
    def by_name(self) -> dict[str, Cuttable]:
        """The groups by their names."""
        return {group.name: group for group in self.groups}

    @property
    def bound(self) -> list[list[Cuttable]]:
        """The groups that get one size because one number counts them, or they are tied, several together."""
        claims = {group.name: [*group.attributes, *(t for t in self.tied if group.name in t)] for group in self.groups}
        return [members for members in joined_by(self.groups, lambda group: claims[group.name]) if members[1:]]

    def plan(self, kept: Mapping[str, Sequence[int] | Tensor], layers: Sequence[str] = ()) -> Cut:
        """Return the cut that leaves some channels of some groups.

        Args:
            kept: Name of a group -> indices of the channels that stay, or (size,) booleans.
            layers: Names of modules to drop.

        Raises:
            ShrinkError: It is no mapping, a name is no group, an index none of its channels, none would stay, or groups
                that have to get one size would get several.
        """
        _require_choice(kept)
        known = self.by_name
        masks: dict[int, Tensor] = {}
        for name, chosen in kept.items():
            if name not in known:
                raise ShrinkError(
                    "the channels are not known",
                    got=name,
                    wanted=f"one of {len(known)} groups, such as `{next(iter(known), '')}`",
                    remedy="names are in `channels(model, example).groups`",
                )
            masks[known[name].number] = _mask(known[name], chosen)
        for tied in self.tied:
            sizes = {int(masks[known[n].number].sum()) if n in kept else known[n].size for n in tied}
            if len(sizes) > 1:
                raise _divided(tied, sorted(sizes))
        return Cut(joined(self._axes(masks)), tuple(self._attributes(masks)), tuple(layers))

    def _axes(self, masks: Mapping[int, Tensor]) -> Iterable[tuple[tuple[str, int], int, tuple[int, ...]]]:
        stay: dict[tuple[str, int], Tensor] = {}
        for group in self.groups:
            for place in group.group.places if group.number in masks else ():
                here = _stay(place.index, masks[group.number])
                key = (place.name, place.axis)
                stay[key] = stay[key] & here if key in stay else here
        for key, here in stay.items():
            yield key, len(here), tuple(here.nonzero().flatten().tolist())

    def _attributes(self, masks: Mapping[int, Tensor]) -> Iterable[AttributeCut]:
        """Yield the numbers that change: each is the size of an axis that its module handles."""
        concerned = {pair for group in self.groups if group.number in masks for pair in group.attributes}
        for module, name in sorted(concerned):
            groups = [group for group in self.groups if (module, name) in group.attributes]
            extents = [extent for extent in self.extents if self._says(module, name, extent, groups)]
            after = {shortened(extent, masks) for extent in extents}
            if len(after) > 1:
                raise _apart(module, name, groups, sorted(after))
            if after:
                yield AttributeCut(module, name, extents[0].size, after.pop())

    def _says(self, module: str, name: str, extent: Extent, groups: Sequence[Cuttable]) -> bool:
        """Whether a number is the size of an axis, along which some of the groups that it counts stand."""
        alike = extent.module == module and self.numbers[module, name] == extent.size
        return alike and extent.counted == (name in COUNTED) and any(group.number in extent.index for group in groups)


def _require_choice(kept: object) -> None:
    """Refuse what does not say which channels of which groups stay."""
    found = kept if isinstance(kept, Mapping) else None
    strange = [one for one in (found or {}).values() if not isinstance(one, Sequence | Tensor) or isinstance(one, str)]
    if found is None or strange:
        raise ShrinkError(
            "the channels that are to stay are impossible",
            got=cut(repr(kept), 80) if found is None else f"{cut(repr(strange[0]), 60)} for a group",
            wanted="a mapping from names of groups to indices of the channels that stay, or to booleans",
            remedy='found.plan({"conv1.weight:0": range(8)})',
        )


def _apart(module: str, name: str, groups: Sequence[Cuttable], sizes: Sequence[int]) -> ShrinkError:
    return ShrinkError(
        "channels that one number counts would get different sizes",
        got=f"`{name}` would be {' and '.join(map(str, sizes))}, for {some([group.name for group in groups])}",
        wanted="one size, since the forward takes it from that number",
        remedy="keep as many channels of each of these groups",
        layer=module,
    )


def _divided(tied: Sequence[str], sizes: Sequence[int]) -> ShrinkError:
    return ShrinkError(
        "channels that the forward divides evenly would get different sizes",
        got=f"{' and '.join(map(str, sizes))} of {some(tied)}",
        wanted="one size, since the forward takes shares of them all, as `chunk` does",
        remedy="keep as many channels of each of these groups",
        layer=tied[0],
    )


COUNTED = ("groups", "num_groups")
"""Attributes of torch's layers that count groups of channels."""


def joined_by(groups: Iterable[Cuttable], keys: Callable[[Cuttable], Iterable[Hashable]]) -> list[list[Cuttable]]:
    """Return groups together that have a key in common, also through others; those of no key by themselves."""
    found: dict[Hashable, list[Cuttable]] = {}  # groups by each key; those that share one share the list
    alone: list[list[Cuttable]] = []
    for group in groups:
        held = list(keys(group))
        others = {id(found[key]): found[key] for key in held if key in found}
        members = [member for several in others.values() for member in several] + [group]
        found |= {key: members for key in [*held, *(key for key, several in found.items() if id(several) in others)]}
        alone += [] if held else [members]
    return [*{id(members): members for members in found.values()}.values(), *alone]


def shortened(extent: Extent, masks: Mapping[int, Tensor]) -> int:
    """Return how many positions of an axis stay."""
    stay = torch.ones(extent.size, dtype=torch.bool, device="cpu")
    for number, index in extent.index.items():
        if number in masks:
            stay &= _stay(index, masks[number])
    return int(stay.sum())


def _stay(index: Tensor, mask: Tensor) -> Tensor:
    return (index < 0) | mask[index.clamp(min=0)]


def _mask(group: Cuttable, chosen: Sequence[int] | Tensor) -> Tensor:
    """Return which channels stay, (size,) booleans."""
    given = chosen.tolist() if isinstance(chosen, Tensor) else list(chosen)
    mask = torch.zeros(group.size, dtype=torch.bool, device="cpu")
    if fits := len(given) == group.size and any(given) and all(type(stays) is bool for stays in given):
        given = [index for index, stays in enumerate(given) if stays]
    else:
        fits = bool(given) and all(type(index) is int and 0 <= index < group.size for index in given)
    mask[given if fits else []] = True
    if not fits:
        raise ShrinkError(
            "the channels that are to stay are impossible",
            got=cut(repr(given), 80),
            wanted=f"some of the indices 0 to {group.size - 1}, or {group.size} booleans that are not all false",
            layer=group.name,
        )
    return mask
