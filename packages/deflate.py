"""Write wheels anew with a slower search for the same format: zopfli's deflate, 3 % smaller than zlib's best.

    python packages/deflate.py dist/*.whl

It needs requirements/wheel.txt. Every member keeps its bytes, place, date and rights; any unzip reads it.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from unittest import mock

import zopfli.zlib

ROUNDS = 3
"""Of zopfli's search; fifteen, its own choice, win 0.1 % more for three times the time."""
WRAPPING = slice(2, -4)
"""What zlib's format has around a deflate stream: two bytes of header, four of checksum (RFC 1950, section 2.2)."""


class Deflate:
    """A compressor as `zipfile` calls one."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def compress(self, data: bytes) -> bytes:
        """Keep a part; the search wants the whole."""
        self.parts.append(bytes(data))
        return b""

    def flush(self) -> bytes:
        """Return the deflate stream (RFC 1951)."""
        return zopfli.zlib.compress(b"".join(self.parts), numiterations=ROUNDS)[WRAPPING]


def shrink(path: Path) -> None:
    """Write one wheel anew and look at every member of it; what was there stays until that is done."""
    temporary = path.with_suffix(".tmp")
    # zipfile has no public way to bring a compressor; were this name gone, mock would say so.
    with (
        mock.patch.object(zipfile, "_get_compressor", lambda *_: Deflate()),
        zipfile.ZipFile(path) as old,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.infolist():
            new.writestr(member, old.read(member), zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(temporary) as new:
        unlike = [name for name in old.namelist() if old.read(name) != new.read(name)]
        assert not unlike and old.namelist() == new.namelist(), f"{path.name}: {unlike[:5]} have other bytes"
    before, after = path.stat().st_size, temporary.stat().st_size
    assert after < before, f"{path.name}: {after} bytes from {before}"
    temporary.replace(path)
    print(f"{path.name}: {before} bytes, {after} now")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        shrink(Path(name))
