"""Files of torch.save: an archive whose entries lie side by side, as they are, and pickles that make little.

An archive can name the same bytes twenty thousand times over, or hold a gigabyte of zeros in a megabyte; whoever then
sums or reads its entries does so for hours. What passes here is no larger when read than on the disk.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

from twofour.errors import cut
from twofour.files.pickled import require_small
from twofour.files.reading import opened

ENTRIES = 1 << 17
"""Entries at most, each a tensor's bytes."""
LARGEST_PICKLE = 1 << 28
"""Bytes of a pickle at most; the tensors' bytes are no part of it."""

_END, _END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_LOCAL = 30
"""Bytes of an entry's own head, without its name."""
_LEGACY = 5
"""Pickles at the start of a file of torch before 1.6: a number, a version, the system, the content, the storages."""


def require_sound(path: str | os.PathLike[str]) -> None:
    """Refuse a file of torch.save that takes more to read than its size, before torch reads it.

    Archives are read through once, for their checksums, which torch does not look at.

    Raises:
        OSError: It is no plain file that this user may read.
        ValueError: It is damaged, has too many entries, entries that overlap or are compressed or written twice, or a
            pickle that makes too much.
        zipfile.BadZipFile: It is no whole archive.
    """
    with opened(path) as file:
        if _begins(file):
            _require_archive(file)
        else:
            for _ in range(_LEGACY):
                require_small(file)


def is_archive(path: Path) -> bool:
    """Tell whether a path is a plain file that begins as an archive does."""
    try:
        with opened(path) as file:
            return _begins(file)
    except OSError:
        return False


def _begins(file: BinaryIO) -> bool:
    """Tell an archive as torch does, by its first bytes; what ends as one may begin with pickles."""
    found = file.read(4) == b"PK\3\4"
    file.seek(0)
    return found


def _require_archive(file: BinaryIO) -> None:
    start = _directory(file)
    with zipfile.ZipFile(file) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
            raise ValueError("a compressed entry: torch.save stores them, and a small one can fill memory")
        if len({entry.filename.lower() for entry in entries}) < len(entries):
            raise ValueError("two entries of one name")
        ends = [entry.header_offset for entry in entries[1:]] + [start]
        for entry, end in zip(entries, ends, strict=True):
            name = len(entry.filename.encode())
            if entry.file_size != entry.compress_size or entry.header_offset + _LOCAL + name + entry.file_size > end:
                raise ValueError(f"entries that overlap: {cut(entry.filename, 80)} reaches over another")
        for entry in entries:
            if entry.filename.lower().endswith(".pkl"):
                if entry.file_size > LARGEST_PICKLE:
                    raise ValueError(f"a pickle of {entry.file_size} bytes, at most {LARGEST_PICKLE} are read")
                require_small(io.BytesIO(archive.read(entry)))
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {cut(damaged, 80)} does not match")


def _directory(file: BinaryIO) -> int:
    """Return where the list of entries starts, having looked at how long it is.

    The end must stand at the very end, as torch writes it, so that every reader finds the same one.
    """
    size = file.seek(0, os.SEEK_END)
    if size < _END.size:
        raise ValueError("an archive cut short")
    signature, _, _, _, count, length, start, comment = _END.unpack(_read(file, size - _END.size, _END.size))
    if signature != b"PK\5\6" or comment:
        raise ValueError("an archive with something behind its end")
    end = size - _END.size
    if end >= _LOCATOR.size:
        locator = _LOCATOR.unpack(_read(file, end - _LOCATOR.size, _LOCATOR.size))
        if locator[0] == b"PK\6\7":
            end = locator[2]
            found = _END_64.unpack(_read(file, end, _END_64.size))
            count, length, start = found[7], found[8], found[9]
    if count > ENTRIES:
        raise ValueError(f"an archive of {count} entries, at most {ENTRIES} are read")
    if start + length != end:
        raise ValueError("an archive with something before its start or behind its list of entries")
    return start


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    found = file.read(count)
    if len(found) != count:
        raise ValueError("an archive cut short")
    return found
