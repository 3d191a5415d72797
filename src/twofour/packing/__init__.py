"""How it is stored: the canonical packed form, its header and its index streams."""

from twofour.packing.geometry import packed_bytes
from twofour.packing.header import (
    DTYPES,
    FORMAT_VERSION,
    HEADER_BYTES,
    LARGEST_WEIGHT,
    Header,
    has_form,
    has_zeros,
    layout_header,
    read_layout_header,
)
from twofour.packing.pack import Packed, pack, packed_rule
from twofour.packing.rewrite import rewrite

__all__ = [
    "DTYPES",
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "LARGEST_WEIGHT",
    "Header",
    "Packed",
    "has_form",
    "has_zeros",
    "layout_header",
    "pack",
    "packed_bytes",
    "packed_rule",
    "read_layout_header",
    "rewrite",
]
