"""Whole files or none: written under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_UMASK = os.umask(0o022)
os.umask(_UMASK)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path; when the block ends well, what it wrote there becomes `path`.

    The content is flushed to the disk before the rename and the folder after it, so that a process killed or a machine
    switched off at any moment leaves the old file or the new one. When the block raises, the old file stays and the
    temporary one is removed.

    Args:
        path: File to write; its folder is made when missing.

    Raises:
        OSError: The folder cannot be made or written to, or `path` is a folder.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_UMASK)  # mkstemp makes it private
        _flush(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some file systems do not let a folder be flushed
        _flush(target.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
