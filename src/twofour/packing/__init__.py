"""How it is stored: the canonical packed form, its header, how zeros are left out and how kept values are written."""

from twofour.packing import encodings, formats, kept
from twofour.packing.header import (
    FORMAT_VERSION,
    HEADER_BYTES,
    LARGEST_WEIGHT,
    Header,
    has_form,
    has_zeros,
    layout_head,
    layout_header,
    packed_bytes,
    read_layout_header,
    read_pattern,
)
from twofour.packing.pack import Packed, dense_of, pack, packed_rule, shape_of
from twofour.packing.regions import one_below_the_other
from twofour.packing.rewrite import rewrite

__all__ = [
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "LARGEST_WEIGHT",
    "Header",
    "Packed",
    "dense_of",
    "encodings",
    "formats",
    "has_form",
    "has_zeros",
    "kept",
    "layout_head",
    "layout_header",
    "one_below_the_other",
    "pack",
    "packed_bytes",
    "packed_rule",
    "read_layout_header",
    "read_pattern",
    "rewrite",
    "shape_of",
]
