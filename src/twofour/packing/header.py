"""What packed bytes say of themselves: pattern, dtype, shape, layout and version (docs/formats.md)."""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass
from math import prod

import torch

from twofour.errors import PackingError, PatternError
from twofour.patterns import Pattern, parse

FORMAT_VERSION = 1
"""Version of the canonical format and of the headers; readers refuse others."""

HEADER_BYTES = 64
"""Size of a header in front of a kernel's layout; one cache line keeps the data behind it aligned."""

_MAGIC = b"24PK"
_STRUCT = struct.Struct("<4sHH12s12s16sqq")  # magic, version, group, pattern, dtype, layout, rows, columns

ZEROS_BIT = 0x8000
"""Set in a layout header's group where the groups have zero points."""

DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int4": torch.int8,
}
"""Encoding of kept values -> dtype they are exchanged in; "tf32" stores float32, "int4" two values a byte."""


@dataclass(frozen=True)
class Header:
    """Identity of a packed weight.

    Attributes:
        pattern: Text of the pattern, for example "2:4".
        dtype: Encoding of the kept values, a key of `DTYPES`.
        shape: Shape of the dense weight.
        axis: Reduction axis of the dense weight, 0 <= axis < len(shape).
        layout: "canonical" in files; the name of a kernel's own order in memory.
        version: Format version.
        group: Inputs that share a scale; 0: one scale per row, or none.
    """

    pattern: str
    dtype: str
    shape: tuple[int, ...]
    axis: int
    layout: str = "canonical"
    version: int = FORMAT_VERSION
    group: int = 0

    @property
    def reduction(self) -> int:
        """Length of the reduction axis."""
        return self.shape[self.axis]

    @property
    def rows(self) -> int:
        """How many reductions there are: the product of the other axes."""
        return prod(self.shape) // self.reduction

    def parsed(self) -> Pattern:
        """Return the pattern as an object."""
        return parse(self.pattern)

    def to_dict(self) -> dict[str, object]:
        """Return JSON-able fields; `group` only where there are groups."""
        fields = {**asdict(self), "shape": list(self.shape)}
        return fields if self.group else {key: value for key, value in fields.items() if key != "group"}

    @classmethod
    def from_dict(cls, fields: object) -> Header:
        """Read and validate fields that came from a file.

        Raises:
            PackingError: A field is missing, of the wrong type, or names something this version cannot read.
        """
        known = {"pattern", "dtype", "shape", "axis", "layout", "version"}
        if not isinstance(fields, dict) or set(fields) - {"group"} != known:
            raise _malformed(f"{fields!r:.200}", "an object with pattern, dtype, shape, axis, layout and version")
        shape, axis = fields["shape"], fields["axis"]
        whole = [*shape, axis, fields["version"]] if isinstance(shape, list) else [None]
        if not all(type(value) is int for value in whole) or not 1 <= len(shape) <= 5 or min(shape) < 1:
            raise _malformed(f"shape {shape!r:.80}, axis {axis!r:.20}", "1 to 5 positive whole numbers and an axis")
        if not 0 <= axis < len(shape) or prod(shape) > 1 << 40:
            raise _malformed(f"shape {shape}, axis {axis}", "an axis of the shape, and at most 2^40 values")
        if fields["version"] != FORMAT_VERSION or fields["layout"] != "canonical":
            raise _malformed(
                f"version {fields['version']}, layout {fields['layout']!r:.40}",
                f'version {FORMAT_VERSION}, layout "canonical"',
            )
        if not isinstance(fields["dtype"], str) or fields["dtype"] not in DTYPES:
            raise _malformed(f"dtype {fields['dtype']!r:.40}", ", ".join(DTYPES))
        if not isinstance(fields["pattern"], str):
            raise _malformed(f"pattern {fields['pattern']!r:.40}", "the text of a pattern")
        scaled = fields.get("group", 0)
        if type(scaled) is not int or not 0 <= scaled < ZEROS_BIT or (scaled and shape[axis] % scaled):
            raise _malformed(f"group {scaled!r:.20}, reduction {shape[axis]}", "a divisor of the reduction, or 0")
        header = cls(fields["pattern"], fields["dtype"], tuple(shape), axis, group=scaled)
        try:
            group = header.parsed().group
        except PatternError as error:
            raise _malformed(f"pattern {header.pattern!r:.40}", "a pattern this version knows") from error
        if header.reduction % group:
            raise _malformed(f"shape {shape}, axis {axis}", f"a reduction axis that is a multiple of {group}")
        return header


def layout_header(
    pattern: str, dtype: str, layout: str, rows: int, columns: int, *, group: int = 0, zeros: bool = False
) -> bytes:
    """Return the 64 bytes that stand in front of a kernel's own layout of a rows x columns weight."""
    scaled = group | (ZEROS_BIT if zeros else 0)
    text = pattern.encode(), dtype.encode(), layout.encode()
    return _STRUCT.pack(_MAGIC, FORMAT_VERSION, scaled, *text, rows, columns)


def read_layout_header(data: bytes) -> Header:
    """Read what `layout_header` wrote.

    Raises:
        PackingError: The bytes are no such header, or one of another version.
    """
    if len(data) != HEADER_BYTES or data[:4] != _MAGIC:
        raise _malformed(f"{data[:8]!r} ...", f"{HEADER_BYTES} bytes that start with {_MAGIC!r}")
    _, version, scaled, pattern, dtype, layout, rows, columns = _STRUCT.unpack(data)
    if version != FORMAT_VERSION:
        raise _malformed(f"version {version}", f"version {FORMAT_VERSION}")
    text = [field.rstrip(b"\0").decode("ascii", "replace") for field in (pattern, dtype, layout)]
    return Header(text[0], text[1], (rows, columns), 1, text[2], version, scaled & ~ZEROS_BIT)


def has_zeros(data: bytes) -> bool:
    """Tell whether a layout's header says that its groups have zero points."""
    return bool(_STRUCT.unpack(data)[2] & ZEROS_BIT)


def _malformed(got: str, wanted: str) -> PackingError:
    return PackingError("the header of a packed weight is malformed", got=got, wanted=wanted)
