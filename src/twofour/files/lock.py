"""One writer of a folder at a time: across processes and across threads."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from twofour.errors import TwofourError
from twofour.files.hold import hold, is_at, let_go

PATIENCE = 30.0
"""Seconds that one who reads or writes a model waits for another process that writes it."""
_POLL = 0.01
"""Seconds between two looks at a lock that another holds."""

_log = logging.getLogger("twofour.files")
_held: dict[tuple[int, int], tuple[int, int]] = {}
"""Folder held by this process, by device and inode -> the thread that holds it, and the open folder."""


@contextmanager
def locked(
    folder: str | os.PathLike[str],
    kind: type[TwofourError],
    *,
    remedy: str,
    wait: float = 0.0,
    passing: bool = False,
) -> Iterator[None]:
    """Keep other processes and threads from writing into `folder` while the block runs.

    Everything of ours that fills a folder in several steps takes this lock: streaming, saves of several files, run
    checkpoints, the demo, the experiments' records. The lock lies on the folder itself (flock), so nothing is left
    behind when the process is killed, and a renamed folder stays locked. A thread that holds it may take it again.
    Child processes do not inherit it. Where the file system has no locks, a warning says so and the block runs.

    Args:
        folder: Made when missing; removed again when the block leaves it empty, if it is still at this path: one that
            lies there once the block has renamed its own is another writer's.
        kind: Error to raise.
        remedy: What a second writer can do, and one whose folder cannot be made.
        wait: Seconds to wait for the other writer.
        passing: The folder is there for the writers alone: an empty one goes too if another writer, killed, made it.

    Raises:
        TwofourError: Of `kind`: another process or thread still writes there, or the folder cannot be made or opened.
            An error of the block passes as it is.
    """
    path = Path(folder)
    try:
        goes = passing or not path.is_dir()
        handle = _opened(path, time.monotonic() + wait)
    except OSError as error:
        raise kind(
            f"the folder {path} cannot be written",
            got=f"{type(error).__name__}: {error}",
            wanted="a folder that may be made and written to, with room on its disk",
            remedy=remedy,
        ) from error
    if handle is None:
        raise kind(
            "another process is writing the same result",
            got=str(path) + (f", still after {wait:g} s" if wait else ""),
            wanted="one process or thread at a time",
            remedy=remedy,
        )
    key = _key(handle)
    again = key in _held
    if not again:
        _held[key] = threading.get_ident(), handle
    try:
        yield
    finally:
        if goes:
            with suppress(OSError):  # something lies there: the usual case
                if is_at(handle, os.path.realpath(path)):
                    path.rmdir()
        _release(key, handle, again)


def _release(key: tuple[int, int], handle: int, again: bool) -> None:
    """Close a folder and, unless the thread holds it once more, end its lock; a forked worker has closed it already."""
    if not again:
        if _held.pop(key, None) is None:
            return
        let_go(handle)
    os.close(handle)


def _opened(path: Path, until: float) -> int | None:
    """Open and lock the folder; None when another writer still holds it at the time `until`."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # the writer before has just removed or renamed it
        try:
            mine = _held.get(_key(handle), (0, 0))[0] == threading.get_ident() or hold(handle)
            if mine is None:
                _log.warning("%s is not kept from other writers: its file system has no locks", path)
            if mine is not False and is_at(handle, os.path.realpath(path)):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if mine is False:
            if time.monotonic() >= until:
                return None
            time.sleep(_POLL)


def _key(handle: int) -> tuple[int, int]:
    found = os.fstat(handle)
    return found.st_dev, found.st_ino


def _forget() -> None:
    """Close what the parent holds: a worker that outlives it would keep the lock."""
    for _, handle in _held.values():
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
