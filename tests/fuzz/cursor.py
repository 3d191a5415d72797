"""Bytes as a row of choices: what a target builds from them can be built again, and a fuzzer changes one choice."""

from __future__ import annotations

import copy
from typing import Any

NUMBERS = [0, 1, 2, 3, 4, 5, 7, 8, 32, 33, 64, 96, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1]
NUMBERS += [(1 << 64) - 1, 10**30, -1, -(1 << 63)]
WORDS: list[Any] = [*NUMBERS, True, None, 0.5, 1e308, "", "x", [], {}, [1 << 20, 1 << 20], [1] * 6, ["x"], {"x": 1}]
"""What any value of a header or of JSON may be replaced by; a target adds the words of its own format."""


class Cursor:
    """Reads choices from bytes; behind their end everything is 0."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def number(self, below: int) -> int:
        """Return a number in [0, below) from as many bytes as it needs."""
        size = max(1, ((below - 1).bit_length() + 7) // 8)
        taken = self.data[self.place : self.place + size]
        self.place += size
        return int.from_bytes(taken, "little") % below

    def pick(self, choices: Any) -> Any:
        """Return one of a sequence."""
        return choices[self.number(len(choices))]

    @property
    def empty(self) -> bool:
        """Whether all bytes are read."""
        return self.place >= len(self.data)


def edit_json(cursor: Cursor, found: Any, words: list[Any] = WORDS, keys: tuple[str, ...] = ("x",)) -> None:
    """Replace, drop, copy or nudge one value somewhere inside JSON, in place.

    Args:
        cursor: Chooses.
        found: A dict or list.
        words: What a value may be replaced by.
        keys: Names that a copy may get.
    """
    holder, last = _pick_place(cursor, found)
    if holder is None:
        return
    action = cursor.number(4)
    if action == 0:
        del holder[last]
    elif action == 1 and isinstance(holder, dict):
        holder[cursor.pick(keys)] = copy.deepcopy(holder[last])
    elif action == 2 and type(holder[last]) is int:
        holder[last] += cursor.number(256) - 128
    else:
        holder[last] = copy.deepcopy(cursor.pick(words))


def _pick_place(cursor: Cursor, found: Any) -> tuple[Any, Any]:
    """Walk down from the root, a choice a step, and stop at a value."""
    holder, last = None, None
    while isinstance(found, dict | list) and found:
        if holder is not None and cursor.number(4) == 0:
            break  # change the whole of it
        holder = found
        last = cursor.pick(list(found) if isinstance(found, dict) else range(len(found)))
        found = found[last]
    return holder, last


def edit_bytes(cursor: Cursor, whole: bytes) -> bytes:
    """Change a byte, cut the end off, take a stretch out or double it."""
    if not whole:
        return bytes([cursor.number(256)])
    action, place = cursor.number(4), cursor.number(1 << 16) % len(whole)
    if action == 0:
        return whole[:place] + bytes([cursor.number(256)]) + whole[place + 1 :]
    length = 1 + cursor.number(64)
    if action == 1:
        return whole[:-length]
    if action == 2:
        return whole[:place] + whole[place + length :]
    return whole[:place] + whole[place : place + length] + whole[place:]
