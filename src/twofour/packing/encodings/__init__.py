"""How a kept value is written: one file per encoding, and the table of them.

Patterns and encodings are two axes: `packing.has_form` says which meet. An encoding of another package joins by `add`.
"""

from __future__ import annotations

from twofour.errors import PackingError
from twofour.packing.encodings.base import Encoding, Flaw, dequantize
from twofour.packing.encodings.bits import LOW_BITS, TERNARY, TERNARY5, TWOS, WIDEST, Bits, NumberSystem
from twofour.packing.encodings.int4 import GROUPS, INT4, INT4_LARGEST, INT4_LEAST
from twofour.packing.encodings.int8 import INT8, INT8_LARGEST
from twofour.packing.encodings.real import BFLOAT16, FLOAT8, FLOAT16, FLOAT32
from twofour.packing.encodings.tf32 import TF32, TF32_CODES

__all__ = [
    "BFLOAT16",
    "FLOAT8",
    "FLOAT16",
    "FLOAT32",
    "GROUPS",
    "INT4",
    "INT4_LARGEST",
    "INT4_LEAST",
    "INT8",
    "INT8_LARGEST",
    "LOW_BITS",
    "TERNARY",
    "TERNARY5",
    "TF32",
    "TF32_CODES",
    "TWOS",
    "WIDEST",
    "Bits",
    "Encoding",
    "Flaw",
    "NumberSystem",
    "add",
    "dequantize",
    "find",
    "get",
    "known",
]

_BY_NAME: dict[str, Encoding] = {
    encoding.name: encoding for encoding in (FLOAT32, TF32, FLOAT16, BFLOAT16, FLOAT8, INT8, INT4, *LOW_BITS)
}


def known() -> tuple[Encoding, ...]:
    """Return every encoding, the widest values first."""
    return tuple(_BY_NAME.values())


def find(name: object) -> Encoding | None:
    """Return the encoding of that name; None where there is none, whatever `name` is."""
    return _BY_NAME.get(name) if isinstance(name, str) else None


def get(name: str) -> Encoding:
    """Return the encoding of that name.

    Raises:
        PackingError: There is none.
    """
    encoding = find(name)
    if encoding is None:
        raise PackingError("the encoding is not known", got=repr(name), wanted=", ".join(_BY_NAME))
    return encoding


def add(encoding: Encoding) -> Encoding:
    """Add an encoding of another package and return it; names are those of headers, at most 12 letters.

    Raises:
        PackingError: The name is taken by another encoding, or does not fit a header.
    """
    held = _BY_NAME.setdefault(encoding.name, encoding) if len(encoding.name.encode()) <= 12 else None
    if held != encoding:
        raise PackingError(
            "an encoding cannot be added",
            got=repr(encoding.name),
            wanted=f"a name of at most 12 letters other than {', '.join(_BY_NAME)}",
        )
    return encoding
