"""Bytes to a damaged twofour file: which file, which damages, where; nothing random, so inputs can be replayed.

A fuzzer that changes bytes of a whole file seldom gets past the header's length and its JSON. Here a few bytes choose a
good file and edits of its parts, which are put together again with correct lengths, unless the edit is of the lengths.
"""

from __future__ import annotations

import copy
import json
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from twofour.export import Contents
from twofour.export.file import write
from twofour.packing import Packed, pack
from twofour.patterns import parse

KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("2:4", "float32", {}),
    ("2:4", "bfloat16", {}),
    ("2:4", "int8", {}),
    ("2:4", "int4", {"group": 32, "symmetric": False}),
    ("1:2", "tf32", {}),
    ("1:4", "float16", {}),
    ("2:6", "float32", {}),
    ("4:2:8", "float32", {}),
    ("4:8-pairs", "int4", {}),
)
"""Pattern, encoding and options of the packed weight in each good file."""

WEIGHT, ROWS = "fc.weight", 8
WORDS = [0, 1, 2, 3, 4, 5, 7, 8, 32, 33, 64, 96, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1]
WORDS += [(1 << 64) - 1, 10**30, -1, -(1 << 63), True, None, 0.5, 1e308, "", "2:4", "1:2", "4:8", "2:4:8", "4:8-pairs"]
WORDS += ["2:4-transposable", "64:2:16", "float32", "tf32", "int4", "int8", "bfloat16", "canonical", WEIGHT, [], {}]
WORDS += [[8], [8, 96], [96, 8], [1 << 20, 1 << 20], [1, 1, 1, 1, 1, 1], ["x"], {"x": 1}, "F64", "U8", "F8_E8M0", "I8"]
"""What a field of a header or of the JSON may be replaced by."""


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


@cache
def good(kind: int) -> tuple[dict[str, Any], bytes]:
    """Return a good file's safetensors header and its data."""
    pattern, dtype, options = KINDS[kind]
    draw = torch.Generator().manual_seed(kind)
    weight = torch.randn(ROWS, 96, generator=draw)
    weight = weight * parse(pattern).project(weight, absolute=True)
    if pattern == "4:8-pairs":
        weight = (weight * 2).clamp(-8, 7).to(torch.int8)
    packed: Packed = pack(weight, pattern, dtype, **options)
    plain = {"fc.bias": torch.randn(ROWS, generator=draw)}
    aliases = {"tied.weight": WEIGHT, "tied.bias": "fc.bias"}
    settings = {
        "kind": "compiled",
        "dtype": "float32",
        "tokens": [1],
        "counts": {"fc": 1},
        "patterns": {WEIGHT: pattern},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "good.safetensors"
        write(path, Contents(plain, {WEIGHT: packed}, aliases, settings))
        whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def damaged(data: bytes) -> bytes:
    """Return the file that these bytes describe; no bytes: a good one."""
    cursor = Cursor(data)
    header, body = good(cursor.number(len(KINDS)))
    header, content = json.loads(json.dumps(header)), bytearray(body)
    described = json.loads(header["__metadata__"]["twofour"])
    late: list[Callable[[bytes], bytes]] = []
    for _ in range(8):
        if cursor.empty:
            break
        cursor.pick(EDITS)(cursor, header, described, content, late)
    if isinstance(header.get("__metadata__"), dict) and "twofour" in header["__metadata__"]:
        header["__metadata__"]["twofour"] = json.dumps(described)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    whole = struct.pack("<Q", len(text)) + text + bytes(content)
    for edit in late:
        whole = edit(whole)
    return whole


def _places(found: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value inside JSON."""
    inner = (
        list(found.items()) if isinstance(found, dict) else list(enumerate(found)) if isinstance(found, list) else []
    )
    return [path, *(place for key, value in inner for place in _places(value, (*path, key)))]


def _edit_json(cursor: Cursor, found: Any) -> None:
    """Replace, drop or copy one value somewhere inside."""
    places = _places(found)[1:]
    if not places:
        return
    *way, last = cursor.pick(places)
    for key in way:
        found = found[key]
    action = cursor.number(4)
    if action == 0:
        del found[last]
    elif action == 1 and isinstance(found, dict):
        found[cursor.pick(["x", WEIGHT, "fc.bias", "tied.weight", "group", "version"])] = copy.deepcopy(found[last])
    elif action == 2 and type(found[last]) is int:
        found[last] += cursor.number(256) - 128
    else:
        found[last] = copy.deepcopy(cursor.pick(WORDS))


def _header(cursor: Cursor, header: dict, _described: Any, _content: bytearray, _late: list) -> None:
    _edit_json(cursor, {name: of for name, of in header.items() if name != "__metadata__"})


def _description(cursor: Cursor, _header: dict, described: Any, _content: bytearray, _late: list) -> None:
    _edit_json(cursor, described)


def _weight(cursor: Cursor, _header: dict, described: Any, _content: bytearray, _late: list) -> None:
    packed = described.get("packed") if isinstance(described, dict) else None
    if isinstance(packed, dict):
        _edit_json(cursor, packed)


def _byte(cursor: Cursor, _header: dict, _described: Any, content: bytearray, _late: list) -> None:
    content[cursor.number(len(content))] = cursor.number(256)


def _part(cursor: Cursor, header: dict, _described: Any, content: bytearray, _late: list) -> None:
    """Overwrite bytes of values, indices, scales or zero points."""
    names = [name for name in header if name.startswith(WEIGHT) and isinstance(header[name], dict)]
    offsets = header[cursor.pick(names)].get("data_offsets") if names else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        return
    start, end = offsets
    if 0 <= start < end <= len(content):
        for _ in range(1 + cursor.number(4)):
            content[start + cursor.number(end - start)] = cursor.number(256)


def _cut(cursor: Cursor, _header: dict, _described: Any, _content: bytearray, late: list) -> None:
    end = cursor.number(1 << 12)
    late.append(lambda whole: whole[: len(whole) - end] if end else whole + b"\0")


def _length(cursor: Cursor, _header: dict, _described: Any, _content: bytearray, late: list) -> None:
    length = cursor.pick([number for number in WORDS if type(number) is int and 0 <= number < 1 << 64])
    late.append(lambda whole: struct.pack("<Q", length) + whole[8:])


def _raw(cursor: Cursor, _header: dict, _described: Any, _content: bytearray, late: list) -> None:
    place, value = cursor.number(1 << 16), cursor.number(256)

    def edit(whole: bytes) -> bytes:
        changed = bytearray(whole)
        if changed:
            changed[place % len(changed)] = value
        return bytes(changed)

    late.append(edit)


EDITS = (_header, _cut, _length, _raw, *(_description, _byte) * 2, *(_weight, _part) * 4)
