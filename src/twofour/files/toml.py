"""TOML files within limits: Python's reader needs time and memory quadratic in the parts of a dotted key."""

from __future__ import annotations

import os
import re
import tomllib
from typing import Any

from twofour.files.reading import read_text

LARGEST_TOML = 1 << 20
"""Bytes of a file: twenty thousand rules."""
PARTS = 64
"""Parts of a dotted key at most; one of 80,000 parts, 160 kB, takes all memory of a machine."""

_TEXTS = re.compile(r""""(?:[^"\\\n]|\\[^\n])*+"?|'[^'\n]*+'?""")
"""Texts of one line, to their end or the line's; whatever they begin with is taken, so that time is linear."""


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        OSError: It is no plain file that this user may read.
        ValueError: It is larger than `LARGEST_TOML` bytes, no UTF-8, no TOML, has a multi-line text (in which a dotted
            key could hide), a key of more than `PARTS` parts, or is nested too deeply.
    """
    text = read_text(path, LARGEST_TOML)
    if '"""' in text or "'''" in text:
        raise ValueError("a text of several lines, wanted texts of one line")
    parts = max(piece.count(".") for piece in re.split(r"[\n=,\[\]{}]", _TEXTS.sub("", text))) + 1
    if parts > PARTS:
        raise ValueError(f"a key of {parts} parts, at most {PARTS} are read")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("lists and tables nested too deeply (RecursionError)") from error
