"""The name of a file or folder, checked where a caller gives it."""

from __future__ import annotations

import os
from pathlib import Path

from twofour.errors import TwofourError, cut

LONGEST = 255
"""Bytes of a file's name at most: ext4, XFS, btrfs, APFS and NTFS alike."""


def named(path: object, kind: type[TwofourError], what: str = "the path") -> Path:
    """Return a path that a caller gave; "" is none, though `Path("")` would be the current folder.

    Args:
        path: Text, or an object such as `pathlib.Path`.
        kind: Error to raise.
        what: What it is called in messages.

    Raises:
        TwofourError: Of `kind`: it is no text, is empty, holds a zero byte, or a part of it is longer than any file
            system's names.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if isinstance(text, str) and text and "\0" not in text:
        found = Path(text)
        if (longest := max((len(os.fsencode(part)) for part in found.parts), default=0)) > LONGEST:
            raise kind(
                f"{what} is too long",
                got=f"a name of {longest} bytes: {cut(text, 120)}",
                wanted=f"names of at most {LONGEST} bytes, as file systems have them",
                remedy="choose a shorter name",
            )
        return found
    raise kind(
        f"{what} names no file or folder",
        got=repr(path) if isinstance(path, str | bytes | int | None) else type(path).__name__,
        wanted="text that is not empty, or a pathlib.Path",
        remedy='"." is the current folder; os.fsdecode makes text of bytes',
    )


def kind_of(path: Path) -> str:
    """Say of a path that exists whether it is a folder, or which file by its ending."""
    return "a folder" if path.is_dir() else f"a {path.suffix} file" if path.suffix else "a file without an ending"
