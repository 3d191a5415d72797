"""Layers that are alike, on one line: equal layers of a network have names that differ in few places."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

_QUOTED = re.compile("`([^`]*)`")

_Box = tuple[tuple[str, ...], ...]
"""The values of each part of a name; it stands for every name that takes one value of each."""


@dataclass(frozen=True)
class Group:
    """Layers with one key.

    Attributes:
        pattern: Stands for their names and no others: `encoder.layer.{0-5}.attention.{query,key}`.
        members: Their positions among the names given.
    """

    pattern: str
    members: tuple[int, ...]

    @property
    def count(self) -> str:
        """The number of layers as a cell of a table, "" for one."""
        return f"x{len(self.members)}" if len(self.members) > 1 else ""


def grouped(names: Sequence[str], keys: Sequence[Hashable]) -> list[Group]:
    """Return groups of the names that have equal keys and one pattern, in the order of their first members."""
    found: dict[Hashable, dict[tuple[str, ...], list[int]]] = {}
    for index, (name, key) in enumerate(zip(names, keys, strict=True)):
        parts = tuple(name.split("."))
        found.setdefault((key, len(parts)), {}).setdefault(parts, []).append(index)
    groups: list[Group] = []
    for places in found.values():
        for box in _boxes(places):
            chosen = [parts for parts in places if all(part in held for part, held in zip(parts, box, strict=True))]
            members = sorted(index for parts in chosen for index in places[parts])
            groups.append(Group(_text(box), tuple(members)))
    return sorted(groups, key=lambda group: group.members)


def without_numbers(text: str) -> str:
    """Return a text whose quoted names have * in the place of each number: what equal layers' reasons share."""
    return _QUOTED.sub(lambda name: f"`{'.'.join('*' if p.isdigit() else p for p in name[1].split('.'))}`", text)


def one_text(texts: Sequence[str]) -> str:
    """Return one text for several that differ in the numbers of quoted names, which become patterns."""
    places = iter(list(zip(*(_QUOTED.findall(text) for text in texts), strict=True)))

    def patterns(_: re.Match[str]) -> str:
        names = list(dict.fromkeys(next(places)))
        return ", ".join(f"`{group.pattern}`" for group in grouped(names, [""] * len(names)))

    return _QUOTED.sub(patterns, texts[0])


def _boxes(names: Iterable[tuple[str, ...]]) -> list[_Box]:
    """Return boxes that hold each of the names, all of one length, once and nothing else."""
    boxes: list[_Box] = [tuple((part,) for part in parts) for parts in names]
    while True:
        before = len(boxes)
        for place in range(len(boxes[0])):
            alike: dict[_Box, list[tuple[str, ...]]] = {}
            for box in boxes:  # those that differ in this place alone become one
                alike.setdefault((*box[:place], *box[place + 1 :]), []).append(box[place])
            boxes = [
                (*rest[:place], tuple(value for values in held for value in values), *rest[place:])
                for rest, held in alike.items()
            ]
        if len(boxes) == before:
            return boxes


def _text(box: _Box) -> str:
    return ".".join(values[0] if len(values) == 1 else f"{{{','.join(_runs(values))}}}" for values in box)


def _runs(values: Sequence[str]) -> list[str]:
    """Return values with successive numbers as one: 0, 1, 2, 5, head -> 0-2, 5, head."""
    numbers = sorted({int(value) for value in values if value.isdecimal() and str(int(value)) == value})
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    found = [str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ','}{run[-1]}" for run in runs]
    return found + [value for value in values if not (value.isdecimal() and str(int(value)) == value)]
