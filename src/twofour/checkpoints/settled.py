"""Reading a model that another process may be saving again: the old one whole, or the new one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from twofour.errors import FormatError
from twofour.files import PATIENCE

Result = TypeVar("Result")
Stamp = tuple[int, ...] | None

_PAUSE = 0.001


def settled(path: str | os.PathLike[str], names: tuple[str, ...], read: Callable[[], Result]) -> Result:
    """Return what `read` answers of a file or folder that stood still while it ran; read again where it did not.

    Args:
        path: The file, the folder, or the index in one.
        names: The files of a folder that say which its model is; a save replaces one of them.
        read: Reads the whole model.

    Raises:
        FormatError: What `read` raised of a model that nobody replaced meanwhile, or it is replaced all the time.
    """
    until, place = time.monotonic() + PATIENCE, Path(path)
    while True:
        before = _stamps(place, names)
        try:
            found = read()
        except FormatError:
            if not _replaced(before, _stamps(place, names)) or time.monotonic() > until:
                raise
        else:
            if _stamps(place, names) == before:
                return found
            if time.monotonic() > until:
                raise FormatError(
                    "the model is saved again and again while it is read",
                    got=f"{place}: replaced for {PATIENCE:g} s",
                    wanted="a moment in which nobody writes it",
                    remedy="let the writers pause, or read a copy",
                    code="file-changed",
                )
        time.sleep(_PAUSE)


def _replaced(before: list[Stamp], after: list[Stamp]) -> bool:
    """Whether another file stands in the place of one; the same file with other bytes is no save, but damage."""
    return [stamp and stamp[:2] for stamp in before] != [stamp and stamp[:2] for stamp in after]


def _stamps(path: Path, names: tuple[str, ...]) -> list[Stamp]:
    return [_stamp(path), *(_stamp(path / name) for name in names)]


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    if path.is_dir():  # its own times change with whatever lies in it
        return found.st_dev, found.st_ino
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
