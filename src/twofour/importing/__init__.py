"""Sparse checkpoints of other libraries, read without them: see docs/importing.md."""

from twofour.importing.base import Format, Found, Source, Sparse
from twofour.importing.read import FORMATS, Imported, convert, decode, read, write

__all__ = ["FORMATS", "Format", "Found", "Imported", "Source", "Sparse", "convert", "decode", "read", "write"]
