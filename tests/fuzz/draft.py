"""A safetensors file being drafted: its tensors and metadata can be changed and still agree, or its bytes cease to.

A fuzzer that changes bytes of a whole file seldom gets past the header's length and its JSON. Here most edits are of
parts, which are put together again with right lengths, types and offsets; a few are of the JSON or of the bytes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from tests.fuzz.cursor import NUMBERS, WORDS, Cursor, edit_bytes, edit_json

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
SIZES |= {"F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "C64": 8}
LENGTHS = [number for number in NUMBERS if 0 <= number < 1 << 64]
LARGEST = 1 << 14
"""Bytes of a tensor at most."""


@dataclass
class Part:
    """A tensor: its type by safetensors' name, its shape and its bytes."""

    dtype: str
    shape: list[int]
    content: bytes


@dataclass
class Draft:
    """A file before it is written; copies of a draft share no lists."""

    parts: dict[str, Part]
    metadata: dict[str, str]

    @classmethod
    def of(cls, whole: bytes) -> Draft:
        """Take a good file apart."""
        (length,) = struct.unpack("<Q", whole[:8])
        header = json.loads(whole[8 : 8 + length])
        metadata, body = header.pop("__metadata__", {}), whole[8 + length :]
        parts = {name: Part(of["dtype"], of["shape"], body[slice(*of["data_offsets"])]) for name, of in header.items()}
        return cls(parts, metadata)

    def copy(self) -> Draft:
        """Return one that can be changed."""
        parts = {name: Part(part.dtype, list(part.shape), part.content) for name, part in self.parts.items()}
        return Draft(parts, dict(self.metadata))

    def edit(self, cursor: Cursor, names: tuple[str, ...]) -> None:
        """Change a tensor so that the file stays well-formed: bytes, type, shape, or which there are.

        Args:
            cursor: Chooses.
            names: What a tensor may be copied to.
        """
        if not self.parts:
            return
        name = cursor.pick(list(self.parts))
        part, action = self.parts[name], cursor.number(8)
        if action < 3:
            content = bytearray(part.content)
            for _ in range(1 + cursor.number(4) if content else 0):
                content[cursor.number(1 << 16) % len(content)] = cursor.number(256)
            part.content = bytes(content)
        elif action == 3:
            part.content = bytes([cursor.number(256)]) * len(part.content)
        elif action == 4:
            part.dtype = cursor.pick(list(SIZES))
            self._fit(part)
        elif action == 5:
            self._reshape(cursor, part)
        elif action == 6:
            del self.parts[name]
        else:
            self.parts[cursor.pick(names)] = Part(part.dtype, list(part.shape), part.content)

    def _reshape(self, cursor: Cursor, part: Part) -> None:
        action, place = cursor.number(5), cursor.number(max(1, len(part.shape)))
        if action == 0 and part.shape:
            part.shape[place] = cursor.number(256)
        elif action == 1:
            part.shape.insert(place, cursor.number(4))
        elif action == 2 and part.shape:
            del part.shape[place]
        elif action == 3:
            part.shape.reverse()
        elif part.shape:  # another shape of the same bytes
            part.shape = [prod(part.shape)]
        self._fit(part)

    @staticmethod
    def _fit(part: Part) -> None:
        """Give a tensor as many bytes as its shape and type say; a shape that is none stays."""
        if any(type(size) is not int for size in part.shape):
            return
        if (size := prod(part.shape) * SIZES[part.dtype]) > LARGEST:
            part.shape, size = [size % 128], size % 128 * SIZES[part.dtype]
        part.content = (part.content * (size // len(part.content) + 1) if part.content else bytes(size))[:size]

    def header(self) -> dict[str, Any]:
        """Return the header that describes the tensors as they lie one after the other."""
        found: dict[str, Any] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        at = 0
        for name, part in self.parts.items():
            found[name] = {
                "dtype": part.dtype,
                "shape": part.shape,
                "data_offsets": [at, at := at + len(part.content)],
            }
        return found

    def to_bytes(self, header: dict[str, Any] | None = None) -> bytes:
        """Return the file, with another header where one is given."""
        text = json.dumps(self.header() if header is None else header).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + b"".join(part.content for part in self.parts.values())

    def broken(self, cursor: Cursor) -> bytes:
        """Return the file with one thing wrong: a value of its JSON, its header's length, its bytes."""
        action = cursor.number(4)
        if action < 2:
            header = self.header()
            edit_json(cursor, header, WORDS + list(SIZES), tuple(self.parts) or ("x",))
            return self.to_bytes(header)
        whole = self.to_bytes()
        return edit_bytes(cursor, whole) if action == 2 else struct.pack("<Q", cursor.pick(LENGTHS)) + whole[8:]
