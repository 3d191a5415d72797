"""Cut: which positions of which axes of a model's tensors stay, and which layers go; as JSON it travels in a file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from twofour.errors import ShrinkError, cut

VERSION = 1

MOST = 1 << 26
"""Channels of an axis at most: more than any vocabulary has."""

MOST_KEPT = 1 << 22
"""Positions that stay at most, of all axes together: Llama 3 with 70 billion weights has 3.0 million in its layers, and
a few bytes of a file cannot ask for more than 170 MB of them."""


@dataclass(frozen=True)
class AxisCut:
    """What stays of some axes that are cut alike.

    Attributes:
        size: Positions before.
        kept: Those that stay, ascending.
        places: (tensor, axis) of every axis concerned.

    Raises:
        ShrinkError: Positions are no ascending whole numbers below the size, or a place is none.
    """

    size: int
    kept: tuple[int, ...]
    places: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        """Refuse what no file could hold."""
        _require_size(self.size)
        kept = self.kept if _are(self.kept, int) and bool not in map(type, self.kept) else ()
        ascending = all(low < high for low, high in itertools.pairwise(kept))
        if not kept or not ascending or not (kept[0] >= 0 and kept[-1] < self.size):
            raise _malformed(f"the positions {cut(repr(self.kept), 60)} of an axis of {self.size}")
        if not _are(self.places, object) or not self.places or not all(map(_is_place, self.places)):
            raise _malformed(f"the places {cut(repr(self.places), 80)}")


@dataclass(frozen=True)
class AttributeCut:
    """A whole number that a module's forward uses, such as its number of heads.

    Attributes:
        module: Name of the module.
        name: Name of its attribute.
        before: Its value in the large model.
        after: Its value in the small one.

    Raises:
        ShrinkError: A name is none, or the numbers are none that get smaller.
    """

    module: str
    name: str
    before: int
    after: int

    def __post_init__(self) -> None:
        """Refuse what no file could hold."""
        named = isinstance(self.module, str) and isinstance(self.name, str) and self.name
        whole = type(self.before) is type(self.after) is int and 0 < self.after <= self.before <= MOST
        if not (named and whole):
            held = [self.module, self.name, self.before, self.after]
            raise _malformed(f"the attribute {cut(repr(held), 80)}")

    def __str__(self) -> str:
        return f"{self.module}.{self.name}".lstrip(".") + f" = {self.before} -> {self.after}"


@dataclass(frozen=True)
class Cut:
    """A smaller model, told as what stays of a large one.

    Attributes:
        axes: Axes of parameters and buffers that get shorter.
        attributes: Numbers that forwards use; sizes that torch's own layers hold follow from their tensors.
        layers: Names of modules that go, of the large model.
        biases: Names of layers that get a bias, which takes up the constants of what was cut.

    Raises:
        ShrinkError: A name is none, something is there twice, or more than `MOST_KEPT` positions stay.
    """

    axes: tuple[AxisCut, ...] = ()
    attributes: tuple[AttributeCut, ...] = ()
    layers: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no file could hold."""
        kinds = (("axes", AxisCut), ("attributes", AttributeCut), ("layers", object), ("biases", object))
        for where, kind in kinds:
            if not _are(given := getattr(self, where), kind):
                raise _malformed(f"{cut(repr(given), 60)} as `{where}`")
        for where, names in (("layers", self.layers), ("biases", self.biases)):
            for name in names:
                if not isinstance(name, str) or not name:
                    raise _malformed(f"{cut(repr(name), 60)} in `{where}`")
        places = [place for axis in self.axes for place in axis.places]
        numbers_of = [(attribute.module, attribute.name) for attribute in self.attributes]
        held = (("axis", places), ("layer", self.layers), ("bias", self.biases), ("attribute", numbers_of))
        for what, several in held:
            if twice := _twice(several):
                raise _malformed(f"the {what} {cut(repr(twice), 80)} twice")
        if self.positions > MOST_KEPT:
            raise _too_many(self.positions)

    @property
    def positions(self) -> int:
        """How many positions stay, of all axes together."""
        return sum(len(axis.kept) for axis in self.axes)

    @cached_property
    def kept(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """Return the positions that stay, by tensor and axis."""
        return {place: axis.kept for axis in self.axes for place in axis.places}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON holds it: positions as text, "0-3,7"."""
        axes = [
            {"size": axis.size, "kept": runs(axis.kept), "places": [[name, dim] for name, dim in axis.places]}
            for axis in self.axes
        ]
        found: dict[str, Any] = {"version": VERSION, "axes": axes}
        if self.attributes:
            found["attributes"] = [[a.module, a.name, a.before, a.after] for a in self.attributes]
        found |= {key: list(names) for key, names in (("layers", self.layers), ("biases", self.biases)) if names}
        return found

    def to_text(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_text(cls, text: str) -> Cut:
        """Read what `to_text` wrote.

        Raises:
            ShrinkError: It is no JSON, or no plan.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError, TypeError) as error:
            raise _malformed(f"no JSON: {cut(str(error), 80)}") from error
        return cls.from_dict(found)

    @classmethod
    def from_dict(cls, found: object, most: int = MOST_KEPT) -> Cut:
        """Read what `to_dict` gave. Whether it fits a model is seen when it is applied.

        Args:
            found: What JSON holds.
            most: How many positions may stay, of all axes together.

        Raises:
            ShrinkError: It is of another version, or a part is missing, malformed, too large or there twice.
        """
        if not isinstance(found, dict):
            raise _malformed(f"a {type(found).__name__}")
        given: dict[Any, Any] = found
        if type(given.get("version")) is not int or given["version"] != VERSION:
            raise ShrinkError(
                "the plan of the cut is of another version",
                got=f"version {cut(repr(given.get('version')), 40)}",
                wanted=f"version {VERSION}",
                remedy="use the release of twofour that wrote it",
            )
        if strange := sorted(map(str, given.keys() - {"version", "axes", "attributes", "layers", "biases"})):
            raise _malformed(f"the unknown part {cut(repr(strange[0]), 40)}")
        axes: list[AxisCut] = []
        for axis in _list(given, "axes"):
            axes.append(_axis(axis, most))
            most -= len(axes[-1].kept)
        attributes = tuple(map(_attribute, _list(given, "attributes")))
        return cls(tuple(axes), attributes, tuple(_list(given, "layers")), tuple(_list(given, "biases")))


def runs(kept: Sequence[int]) -> str:
    """Return ascending numbers as text: "0-3,7"."""
    parts: list[list[int]] = []
    for number in kept:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def numbers(text: str, size: int, most: int = MOST_KEPT) -> tuple[int, ...]:
    """Read what `runs` wrote.

    Raises:
        ShrinkError: It is no such text, or a number is none of `size` positions in ascending order, or there are more
            than `most`.
    """
    found: list[range] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        ends = (low, high) if dash else (low, low)
        if not all(end.isascii() and end.isdigit() and len(end) < 10 for end in ends):
            raise _malformed(f"the positions {cut(repr(text), 60)}")
        first, last = map(int, ends)
        if first > last or last >= size or (found and first < found[-1].stop):
            raise _malformed(f"the positions {cut(repr(text), 60)} of an axis of {size}")
        found.append(range(first, last + 1))
    if (count := sum(map(len, found))) > most:
        raise _too_many(count)
    return tuple(itertools.chain.from_iterable(found))


def _twice(several: Sequence[Any]) -> Any:
    seen: set[Any] = set()
    return next((one for one in several if one in seen or seen.add(one)), None)


def _list(found: Mapping[Any, Any], key: str) -> list[Any]:
    part = found.get(key, [])
    if not isinstance(part, list):
        raise _malformed(f"`{key}` as a {type(part).__name__}")
    return part


def _axis(found: object, most: int) -> AxisCut:
    if not isinstance(found, dict) or found.keys() != {"size", "kept", "places"}:
        raise _malformed(f"the axis {cut(repr(found), 80)}")
    given: dict[str, Any] = found
    size, kept, places = given["size"], given["kept"], given["places"]
    _require_size(size)
    if not isinstance(kept, str):
        raise _malformed(f"the positions {cut(repr(kept), 60)}")
    if not isinstance(places, list) or not all(map(_is_place, places)):
        raise _malformed(f"the places {cut(repr(places), 80)}")
    return AxisCut(size, numbers(kept, size, most), tuple((name, axis) for name, axis in places))


def _are(given: object, kind: type) -> bool:
    """Whether something is a tuple, or a list, of one kind."""
    return isinstance(given, tuple | list) and all(isinstance(one, kind) for one in given)


def _require_size(size: object) -> None:
    if type(size) is not int or not 0 < size <= MOST:
        raise _malformed(f"an axis of {cut(repr(size), 40)} positions")


def _is_place(found: object) -> bool:
    match found:
        case [str(name), int(axis)]:
            return bool(name) and type(axis) is int and 0 <= axis < 64
        case _:
            return False


def _attribute(found: object) -> AttributeCut:
    if not isinstance(found, list) or len(found) != 4:
        raise _malformed(f"the attribute {cut(repr(found), 80)}")
    return AttributeCut(*found)


def _too_many(count: int) -> ShrinkError:
    return ShrinkError(
        "the plan of the cut is too large",
        got=f"{count:,} positions that stay",
        wanted=f"at most {MOST_KEPT:,} in all cuts of a model",
        remedy="cut the large model once, to its last sizes",
    )


def _malformed(got: str) -> ShrinkError:
    return ShrinkError(
        "the plan of the cut is malformed",
        got=got,
        wanted="what `Channels.plan` returns, or the JSON of `Cut.to_text`",
        remedy="make it again from the model that was cut",
    )


def joined(places: Iterable[tuple[tuple[str, int], int, tuple[int, ...]]]) -> tuple[AxisCut, ...]:
    """Return the axes that are cut alike as one each, given (place, size, kept); what stays whole is left out."""
    found: dict[tuple[int, tuple[int, ...]], list[tuple[str, int]]] = {}
    for place, size, kept in places:
        if len(kept) < size:
            found.setdefault((size, kept), []).append(place)
    return tuple(AxisCut(size, kept, tuple(held)) for (size, kept), held in found.items())
