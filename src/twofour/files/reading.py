"""Reading: plain files alone, opened without waiting, and no more of them than what they hold can need.

A pipe given by the path of a file would be waited for, a device read without end: whatever is no plain file is refused
before a byte of it is read. Every error is an `OSError` or a `ValueError` whose text is the reason alone, for the
message of the stage that knows what the file was to be.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from twofour.errors import FormatError, cut

LARGEST_TEXT = 1 << 24
"""Bytes of a text that a person could have written: a configuration, a recipe, a list of layers, a record."""
LARGEST_LIST = 100_000_000
"""Bytes of a list of tensors, as safetensors limits its header."""

LARGEST_TOML = 1 << 20
"""Bytes of a TOML file: twenty thousand rules."""
PARTS = 64
"""Parts of a dotted key at most; Python's reader needs time and memory quadratic in them, and one of 80,000 parts, 160
kB, takes all memory of a machine."""

_TEXTS = re.compile(r""""(?:[^"\\\n]|\\[^\n])*+"?|'[^'\n]*+'?""")
"""Texts of one line, to their end or the line's; whatever they begin with is taken, so that time is linear."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


@contextmanager
def opened(path: str | os.PathLike[str], buffering: int = -1) -> Iterator[BinaryIO]:
    """Open a plain file to be read as bytes; a link to one is followed; `buffering` as in Python's `open`.

    Raises:
        OSError: There is none, this user may not read it, or it is a folder, a pipe, a socket or a device.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        kind = stat.S_IFMT(os.fstat(handle).st_mode)
        if kind != stat.S_IFREG:
            raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'no plain file')}, not a plain file", os.fspath(path))
        file = cast(BinaryIO, os.fdopen(handle, "rb", buffering=buffering))
    except BaseException:
        os.close(handle)
        raise
    with file:
        yield file


def require_plain(path: str | os.PathLike[str]) -> None:
    """Refuse what `opened` refuses, before another library opens the path.

    Raises:
        OSError: As `opened`.
    """
    with opened(path):
        pass


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a whole file of at most `most` bytes.

    Raises:
        OSError: As `opened`.
        ValueError: It is larger.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        found = file.read(min(size, most) + 1)  # one more, for a file that grows meanwhile
        if len(found) > most:
            raise ValueError(f"{size} bytes, at most {most} are read")
    return found


def read_text(path: str | os.PathLike[str], most: int = LARGEST_TEXT) -> str:
    """Read a text file in UTF-8, line ends of every system as one; as `read_bytes`.

    Raises:
        OSError: As `opened`.
        ValueError: It is larger than `most` bytes, or no UTF-8.
    """
    return read_bytes(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | os.PathLike[str], most: int = LARGEST_TEXT) -> Any:
    """Read a JSON file.

    Raises:
        OSError: As `opened`.
        ValueError: It is larger than `most` bytes, no UTF-8, no JSON, or nested too deeply.
    """
    try:
        return json.loads(read_text(path, most))
    except RecursionError as error:
        raise ValueError("lists and objects nested too deeply (RecursionError)") from error


def json_or_none(path: str | os.PathLike[str], most: int = LARGEST_TEXT) -> Any:
    """Read a JSON file as `read_json`; None where it cannot be read or is none."""
    try:
        return read_json(path, most)
    except (OSError, ValueError):
        return None


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        OSError: As `opened`.
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


def unreadable(path: str | os.PathLike[str], error: OSError, wanted: str) -> FormatError:
    """Build the error for a file that cannot be opened; `wanted` is its kind, ".safetensors"."""
    return FormatError(
        "there is no such file" if isinstance(error, FileNotFoundError) else "the file cannot be opened",
        got=os.fspath(path)
        if isinstance(error, FileNotFoundError)
        else f"{cut(os.fspath(path), 400)}: {reason(error)}",
        wanted=f"a {wanted} file",
        remedy="ask its owner to let you read it" if isinstance(error, PermissionError) else None,
        code="no-file",
    )


def reason(error: Exception) -> str:
    """Say in a few words why a file is not read: "there is no such file", "permission denied", what is malformed."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error)
