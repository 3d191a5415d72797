"""Open files that this process holds a lock on, told apart from those whose holder is gone."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

_WITHOUT_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EBADF, errno.EINVAL)
"""What file systems without flock answer; EBADF: NFS, of a folder, which cannot be opened for writing."""


def hold(handle: int) -> bool | None:
    """Take the lock of an open file or folder without waiting.

    It ends by `let_go`, or when the last copy of `handle` is closed.

    Returns:
        Whether it is ours now; None where the file system has no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            return None
        raise
    return True


def let_go(handle: int) -> None:
    """End the lock at once, also where a process that was just forked has not yet closed its copy of `handle`."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_UN)


def is_at(handle: int, path: str | os.PathLike[str]) -> bool:
    """Tell whether `path` still names what was opened: another process may have removed or renamed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False
