"""Whole files or none: written under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STALE_SECONDS = 3600
"""Age at which a temporary file is taken for one of a killed process: longer than any write goes without progress."""

_OURS, _SUFFIX = ".twofour-", ".tmp"

_log = logging.getLogger("twofour.files")
_UMASK = os.umask(0o022)
os.umask(_UMASK)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path; when the block ends well, what it wrote there becomes `path`.

    The content is flushed to the disk before the rename and the folder after it, so that a process killed or a machine
    switched off at any moment leaves the old file or the new one. When the block raises, the old file stays and the
    temporary one is removed; what a killed process left goes with the next write of the same file, an hour later at the
    earliest.

    Args:
        path: File to write; its folder is made when missing. A link stays, and what it points to is replaced. A file
            that exists keeps its permissions.

    Raises:
        OSError: The folder cannot be made or written to, or `path` is there and no plain file (a folder, a device).
    """
    target = Path(os.path.realpath(path))
    mode = _mode(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}{_OURS}", suffix=_SUFFIX)
    os.close(handle)
    temporary = Path(name)
    try:
        _remove_stale(target, temporary)
        yield temporary
        temporary.chmod(mode)  # mkstemp makes it private
        _flush(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some file systems do not let a folder be flushed
        _flush(target.parent)


def is_temporary(name: str) -> bool:
    """Tell whether a file's name is one that `replacing` gives to what is not whole yet."""
    return re.fullmatch(rf"\..+{re.escape(_OURS)}[a-z0-9_]{{8}}{re.escape(_SUFFIX)}", name, re.DOTALL) is not None


def cache_folder() -> Path | None:
    """Return where measured times are kept: $TWOFOUR_CACHE, else $XDG_CACHE_HOME/twofour, else ~/.cache/twofour.

    None where TWOFOUR_CACHE is "off" or there is no home folder.
    """
    setting = os.environ.get("TWOFOUR_CACHE", "")
    if setting:
        return None if setting == "off" else Path(setting)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twofour"
    except RuntimeError as error:
        _log.warning("measured times are not kept: %s; set TWOFOUR_CACHE to a folder", error)
        return None


def _mode(target: Path) -> int:
    """Return the permissions that the new file gets: those of the old one, or those of any new file."""
    try:
        found = os.lstat(target).st_mode
    except FileNotFoundError:
        return 0o666 & ~_UMASK
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(target))
    if stat.S_ISLNK(found):  # the real path of a link is a link when links go round
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(target))
    if not stat.S_ISREG(found):
        raise OSError(errno.EINVAL, "not a plain file", os.fspath(target))
    return stat.S_IMODE(found)


def _remove_stale(target: Path, temporary: Path) -> None:
    """Remove what killed processes left of earlier writes of `target`; a running one's file is younger."""
    ours = re.compile(re.escape(f".{target.name}{_OURS}") + "[a-z0-9_]{8}" + re.escape(_SUFFIX))
    with suppress(OSError):  # a folder that may be written to, but not listed
        oldest = temporary.stat().st_mtime - STALE_SECONDS  # the file system's own clock
        for entry in os.scandir(target.parent):
            if ours.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):  # another process may have removed it
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.path)
                        _log.info("removed %s, left by a write that was killed", entry.path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
