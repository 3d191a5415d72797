"""Whole files or none: written under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from twofour.errors import TwofourError
from twofour.files.hold import hold, is_at

STALE_SECONDS = 3600
"""Age at which a temporary file is taken for one of a killed process where the file system has no locks."""

PREFIX, SUFFIX = ".twofour-", ".tmp"
_TEMPORARY = re.compile(rf"\.(.+){re.escape(PREFIX)}[a-z0-9_]{{8}}{re.escape(SUFFIX)}", re.DOTALL)

_log = logging.getLogger("twofour.files")
_UMASK = os.umask(0o022)
os.umask(_UMASK)
_NEW = 0o666 & ~_UMASK
"""Permissions of a new file."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path; when the block ends well, what it wrote there becomes `path`.

    The content is flushed to the disk before the rename and the folder after it, so that a process killed or a machine
    switched off at any moment leaves the old file or the new one. When the block raises, the old file stays and the
    temporary one is removed; what a killed process left goes with the next write of the same file.

    Args:
        path: File to write; its folder is made when missing. A link stays, and what it points to is replaced. A file
            that exists keeps its permissions.

    Raises:
        OSError: The folder cannot be made or written to, or `path` is there and no plain file (a folder, a device).
    """
    target = Path(os.path.realpath(path))
    mode = _mode(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = _made(target)
    try:
        remove_left(target.parent, target.name.__eq__)
        yield temporary
        temporary.chmod(mode)  # mkstemp makes it private
        _flush(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    with suppress(OSError):  # some file systems do not let a folder be flushed
        _flush(target.parent)


@contextmanager
def writing(path: object, kind: type[TwofourError], what: str = "the file") -> Iterator[None]:
    """Say of an error of the operating system inside that something cannot be written.

    Args:
        path: The file or folder.
        kind: The error to raise in its place.
        what: What is written, for the message.

    Raises:
        TwofourError: Of `kind`.
    """
    try:
        yield
    except OSError as error:
        raise kind(
            f"{what} cannot be written",
            got=f"{path}: {error}",
            wanted="a path that may be written to",
            remedy="choose another place, or free space on the disk",
        ) from error


def as_new(path: str | os.PathLike[str]) -> None:
    """Give a file the permissions of any new one: safetensors' own writer leaves its files to their owner alone.

    Raises:
        OSError: It is not there, or another user's.
    """
    os.chmod(path, _NEW)


def is_temporary(name: str) -> bool:
    """Tell whether a file's name is one that `replacing` gives to what is not whole yet."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_left(folder: Path, ours: Callable[[str], bool] = lambda name: True) -> None:
    """Remove what killed processes left of writes into a folder.

    Args:
        folder: Where `replacing` wrote.
        ours: Tells by the name of the file that was to be written whether its temporary file may go.
    """
    with suppress(OSError):  # a folder that may be written to, but not listed
        for entry in os.scandir(folder):
            found = _TEMPORARY.fullmatch(entry.name)
            if found and ours(found[1]) and entry.is_file(follow_symlinks=False):
                _remove_dead(entry.path)


def _mode(target: Path) -> int:
    """Return the permissions that the new file gets: those of the old one, or those of any new file."""
    try:
        found = os.lstat(target).st_mode
    except FileNotFoundError:
        return _NEW
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(target))
    if stat.S_ISLNK(found):  # the real path of a link is a link when links go round
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(target))
    if not stat.S_ISREG(found):
        raise OSError(errno.EINVAL, "not a plain file", os.fspath(target))
    return stat.S_IMODE(found)


def _made(target: Path) -> tuple[int, Path]:
    """Make a temporary file and hold it, so that it can be told from one whose process was killed."""
    while True:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}{PREFIX}", suffix=SUFFIX)
        if hold(handle) is not False and is_at(handle, name):
            return handle, Path(name)
        os.close(handle)  # another write took it for a dead one before it was held


def _remove_dead(path: str) -> None:
    """Remove a temporary file that no process holds; without locks, one that is an hour old."""
    with suppress(OSError):  # another process may have removed it
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            free = hold(handle)
            if free is None:
                free = os.fstat(handle).st_mtime < time.time() - STALE_SECONDS
            if free and is_at(handle, path):
                os.unlink(path)
                _log.info("removed %s, left by a write that was killed", path)
        finally:
            os.close(handle)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
