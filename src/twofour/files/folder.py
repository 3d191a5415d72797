"""Folders that appear whole or not at all, and the removal of what we wrote and nothing else."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from twofour.files.hold import hold
from twofour.files.replacing import PREFIX, SUFFIX, is_temporary

_NEW = "new"
_SAFETENSORS = re.compile(r"\.tmp[A-Za-z0-9]{6}")
"""What safetensors' own writer, which transformers calls, leaves when it is killed."""

_log = logging.getLogger("twofour.files")


@contextmanager
def making(target: Path, put: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a new folder, hidden beside `target`; when the block ends well, `put` brings it to its place.

    Whatever is left of it goes at the end. What killed runs left of earlier ones goes after `put`, as far as it has
    names that this block wrote too; other files in it stay, and a warning says so.

    Args:
        target: What is being made; its folder exists.
        put: Given the filled folder: renames it, or the files in it.

    Raises:
        OSError: The place cannot be written to.
    """
    prefix = f".{target.name[:100]}{PREFIX}"
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=prefix, suffix=SUFFIX))
    handle = os.open(work, os.O_RDONLY)
    try:
        hold(handle)
        made = work / _NEW
        made.mkdir()
        yield made
        names = names_in(made)
        put(made)
        _sweep(target.parent, prefix, names)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # made above, under a random name, readable by this user alone
        os.close(handle)


def names_in(folder: Path) -> set[str]:
    """Return the paths of all files in a folder, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def remove_known(folder: Path, names: Collection[str]) -> bool:
    """Remove those files of a folder whose names are given, and temporary ones of ours; return whether it is gone."""
    for inside, _, files in os.walk(folder, topdown=False):
        for file in files:
            path = Path(inside, file)
            if path.relative_to(folder).as_posix() in names or is_temporary(file):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # something lies there that is not ours
            os.rmdir(inside)
    return not folder.exists()


def _sweep(parent: Path, prefix: str, names: Collection[str]) -> None:
    ours = re.compile(re.escape(prefix) + "[a-z0-9_]{8}" + re.escape(SUFFIX))
    for work in parent.iterdir():
        if not ours.fullmatch(work.name) or work.is_symlink() or not work.is_dir():
            continue
        with suppress(OSError):  # another run removes it too
            handle = os.open(work, os.O_RDONLY)
            try:
                if hold(handle):
                    _remove_work(work, names)
            finally:
                os.close(handle)


def _remove_work(work: Path, names: Collection[str]) -> None:
    made = work / _NEW
    left = {name for name in names_in(made) if _SAFETENSORS.fullmatch(Path(name).name)}
    remove_known(made, {*names, *left})
    with suppress(OSError):
        work.rmdir()
    if work.exists():
        _log.warning("%s stays: a run that was killed left it, and it holds files that this one did not write", work)
