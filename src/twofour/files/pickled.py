"""Pickles: what unpickling one would make is sized from its opcodes, before anything is made.

torch's unpickler calls nothing foreign, but it has no limits: a tuple of a tuple twice, forty times over, is 300 bytes
and takes for ever to hash; one nested a million deep ends the process; `bytearray(10**11)` fills the memory. This is a
machine with the opcodes of that unpickler whose values are sizes alone.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import BinaryIO

OPCODES = 1 << 23
"""Opcodes of a file's pickles at most: forty a tensor."""
VALUES = 1 << 23
"""Values at most, one that stands in several places counted in each."""
DEPTH = 64
"""Containers inside one another at most."""

_SCALARS = {
    "NONE",
    "NEWFALSE",
    "NEWTRUE",
    "BININT",
    "BININT1",
    "BININT2",
    "BINFLOAT",
    "LONG1",
    "SHORT_BINSTRING",
}
_EMPTY = {"EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ADDED = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
_FILLED = ("builtins bytearray", "__builtin__ bytearray")
"""Makes as many bytes as a number says."""
_ENCODED = "_codecs encode"
_CODEC = "latin1"
"""The codec by which bytes are pickled; others take time quadratic in a text's length."""


@dataclass(slots=True)
class _Size:
    """What is known of a value.

    Attributes:
        values: Values in it, itself counted.
        depth: How deep containers stand in it.
        held: Whether it stands in another already.
        text: A short text, or the name of a function.
        parts: What a tuple holds.
    """

    values: int = 1
    depth: int = 0
    held: bool = False
    text: str = ""
    parts: tuple[_Size, ...] = ()


def require_small(file: BinaryIO) -> None:
    """Read one pickle to its end and refuse one that would make more than a checkpoint can need.

    Raises:
        ValueError: It is malformed, has an opcode that torch does not read, or makes too much; the text says which.
    """
    stack = _Stack()
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        if count >= OPCODES:
            raise ValueError(f"a pickle of more than {OPCODES} opcodes")
        try:
            stack.run(opcode.name, argument)
        except (IndexError, KeyError) as error:
            raise ValueError(f"a pickle whose {opcode.name} finds nothing") from error


class _Stack:
    def __init__(self) -> None:
        self.top: list[_Size] = []
        self.marked: list[list[_Size]] = []
        self.memo: dict[int, _Size] = {}

    def run(self, name: str, argument: object) -> None:
        """Do to sizes what an opcode does to values."""
        if name in _SCALARS or name in _EMPTY:
            self.top.append(_Size())
        elif name == "BINUNICODE":
            self.top.append(_Size(text=str(argument)[:16]))
        elif name == "GLOBAL":
            if argument in _FILLED:
                raise ValueError("a pickle that makes a bytearray, which is no tensor")
            self.top.append(_Size(text=str(argument)))
        elif name in ("BINGET", "LONG_BINGET"):
            self.top.append(self.memo[_index(argument)])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[_index(argument)] = self.top[-1]
        elif name == "MARK":
            self.marked.append(self.top)
            self.top = []
        elif name == "BINPERSID":
            self._make([self.top.pop()])
        elif name in ("TUPLE", *_TUPLES):
            self._make(self._since_mark() if name == "TUPLE" else self._last(_TUPLES[name]))
        elif name in ("APPENDS", "SETITEMS", *_ADDED):
            self._add(self._last(_ADDED[name]) if name in _ADDED else self._since_mark())
        elif name in ("REDUCE", "NEWOBJ"):
            self._call(*self._last(2))
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"a pickle with the opcode {name}, which torch does not read")

    def _last(self, count: int) -> list[_Size]:
        if len(self.top) < count:
            raise IndexError
        taken = self.top[-count:]
        del self.top[-count:]
        return taken

    def _since_mark(self) -> list[_Size]:
        taken, self.top = self.top, self.marked.pop()
        return taken

    def _make(self, parts: list[_Size]) -> None:
        self.top.append(_Size(parts=tuple(parts[:3])))
        self._add(parts)

    def _add(self, parts: list[_Size]) -> None:
        """Put values into the one on top of the stack."""
        whole = self.top[-1]
        if whole.held or any(part is whole for part in parts):
            raise ValueError("a pickle that changes a container after it was put into another")
        for part in parts:
            part.held = True
            whole.values += part.values
            whole.depth = max(whole.depth, part.depth + 1)
        if whole.values > VALUES or whole.depth > DEPTH:
            made = f"{whole.values} values, {whole.depth} deep"
            raise ValueError(f"a pickle of {made}; at most {VALUES} values, {DEPTH} deep, are read")

    def _call(self, function: _Size, given: _Size) -> None:
        if function.text == _ENCODED and [part.text for part in given.parts[1:]] != [_CODEC]:
            raise ValueError(f"a pickle that encodes a text by another codec than {_CODEC}")
        self._make([given])


def _index(argument: object) -> int:
    assert isinstance(argument, int), argument
    return argument
