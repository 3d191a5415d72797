"""How it is stored: the canonical packed form, its header and its index streams."""

from twofour.packing.header import (
    DTYPES,
    FORMAT_VERSION,
    HEADER_BYTES,
    LARGEST_WEIGHT,
    Header,
    has_zeros,
    layout_header,
    read_layout_header,
)
from twofour.packing.pack import Packed, pack

__all__ = [
    "DTYPES",
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "LARGEST_WEIGHT",
    "Header",
    "Packed",
    "has_zeros",
    "layout_header",
    "pack",
    "read_layout_header",
]
