"""Cut: which positions of which axes of a model's tensors stay, and which layers go; as JSON it travels in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twofour.errors import ShrinkError, cut

VERSION = 1

MOST = 1 << 26
"""Channels of an axis at most in a file: more than any vocabulary has, and few enough to list."""


@dataclass(frozen=True)
class AxisCut:
    """What stays of some axes that are cut alike.

    Attributes:
        size: Positions before.
        kept: Those that stay, ascending.
        places: (tensor, axis) of every axis concerned.
    """

    size: int
    kept: tuple[int, ...]
    places: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class AttributeCut:
    """A whole number that a module's forward uses, such as its number of heads.

    Attributes:
        module: Name of the module.
        name: Name of its attribute.
        before: Its value in the large model.
        after: Its value in the small one.
    """

    module: str
    name: str
    before: int
    after: int


@dataclass(frozen=True)
class Cut:
    """A smaller model, told as what stays of a large one.

    Attributes:
        axes: Axes of parameters and buffers that get shorter.
        attributes: Numbers that forwards use; sizes that torch's own layers hold follow from their tensors.
        layers: Names of modules that go, of the large model.
        biases: Names of layers that get a bias, which takes up the constants of what was cut.
    """

    axes: tuple[AxisCut, ...] = ()
    attributes: tuple[AttributeCut, ...] = ()
    layers: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()

    @property
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
    def from_dict(cls, found: object) -> Cut:
        """Read what `to_dict` gave. Whether it fits a model is seen when it is applied.

        Raises:
            ShrinkError: It is of another version, or a part is missing, malformed or there twice.
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
        plan = cls(
            tuple(map(_axis, _list(given, "axes"))),
            tuple(map(_attribute, _list(given, "attributes"))),
            tuple(_name(name, "layers") for name in _list(given, "layers")),
            tuple(_name(name, "biases") for name in _list(given, "biases")),
        )
        places = [place for axis in plan.axes for place in axis.places]
        for what, several in (("axis", places), ("layer", plan.layers), ("bias", plan.biases)):
            if twice := _twice(several):
                raise _malformed(f"the {what} {cut(repr(twice), 80)} twice")
        if twice := _twice([(a.module, a.name) for a in plan.attributes]):
            raise _malformed(f"the attribute {cut(repr(twice), 80)} twice")
        return plan


def runs(kept: Sequence[int]) -> str:
    """Return ascending numbers as text: "0-3,7"."""
    parts: list[list[int]] = []
    for number in kept:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def numbers(text: str, size: int) -> tuple[int, ...]:
    """Read what `runs` wrote.

    Raises:
        ShrinkError: It is no such text, or a number is none of `size` positions in ascending order.
    """
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        ends = (low, high) if dash else (low, low)
        if not all(end.isascii() and end.isdigit() and len(end) < 10 for end in ends):
            raise _malformed(f"the positions {cut(repr(text), 60)}")
        first, last = map(int, ends)
        if first > last or last >= size or (found and first <= found[-1]):
            raise _malformed(f"the positions {cut(repr(text), 60)} of an axis of {size}")
        found += range(first, last + 1)
    return tuple(found)


def _twice(several: Sequence[Any]) -> Any:
    seen: set[Any] = set()
    return next((one for one in several if one in seen or seen.add(one)), None)


def _list(found: Mapping[Any, Any], key: str) -> list[Any]:
    part = found.get(key, [])
    if not isinstance(part, list):
        raise _malformed(f"`{key}` as a {type(part).__name__}")
    return part


def _name(found: object, where: str) -> str:
    if not isinstance(found, str) or not found:
        raise _malformed(f"{cut(repr(found), 60)} in `{where}`")
    return found


def _axis(found: object) -> AxisCut:
    if not isinstance(found, dict) or found.keys() != {"size", "kept", "places"}:
        raise _malformed(f"the axis {cut(repr(found), 80)}")
    given: dict[str, Any] = found
    size, kept, places = given["size"], given["kept"], given["places"]
    if type(size) is not int or not 0 < size <= MOST or not isinstance(kept, str):
        raise _malformed(f"an axis of {cut(repr(size), 40)} positions")
    if not isinstance(places, list) or not places or not all(map(_is_place, places)):
        raise _malformed(f"the places {cut(repr(places), 80)}")
    return AxisCut(size, numbers(kept, size), tuple((name, axis) for name, axis in places))


def _is_place(found: object) -> bool:
    match found:
        case [str(name), int(axis)]:
            return bool(name) and type(axis) is int and 0 <= axis < 64
        case _:
            return False


def _attribute(found: object) -> AttributeCut:
    match found:
        case [str(module), str(name), int(before), int(after)] if name and not {bool} & {type(before), type(after)}:
            if 0 < after <= before <= MOST:
                return AttributeCut(module, name, before, after)
    raise _malformed(f"the attribute {cut(repr(found), 80)}")


def _malformed(got: str) -> ShrinkError:
    return ShrinkError(
        "the plan of the cut is malformed",
        got=got,
        wanted="the JSON of `Cut.to_text`",
        remedy="write it again from the model that was cut",
    )


def joined(places: Iterable[tuple[tuple[str, int], int, tuple[int, ...]]]) -> tuple[AxisCut, ...]:
    """Return the axes that are cut alike as one each, given (place, size, kept); what stays whole is left out."""
    found: dict[tuple[int, tuple[int, ...]], list[tuple[str, int]]] = {}
    for place, size, kept in places:
        if len(kept) < size:
            found.setdefault((size, kept), []).append(place)
    return tuple(AxisCut(size, kept, tuple(held)) for (size, kept), held in found.items())
