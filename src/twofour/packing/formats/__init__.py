"""How the zeros of a packed weight are left out: one file per format, and which patterns it stores."""

from __future__ import annotations

from twofour.packing.formats.base import WRITE_AGAIN, Format
from twofour.packing.formats.block import BlockRows
from twofour.packing.formats.dense import DenseRows
from twofour.packing.formats.hybrid import HybridRows
from twofour.packing.formats.nm import ConstantCount
from twofour.patterns import Pattern

__all__ = ["FORMATS", "WRITE_AGAIN", "BlockRows", "ConstantCount", "DenseRows", "Format", "HybridRows", "find"]

FORMATS: tuple[type[Format], ...] = (ConstantCount, BlockRows, HybridRows, DenseRows)


def find(pattern: Pattern) -> type[Format] | None:
    """Return the format that weights of a pattern are stored in, None where there is none."""
    return next((form for form in FORMATS if form.takes(pattern)), None)
