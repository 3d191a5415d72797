"""What packed bytes say of themselves: pattern, dtype, shape, layout and version (docs/formats.md)."""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, TypeGuard

from torch import Tensor

from twofour.errors import PackingError, PatternError, cut
from twofour.packing import encodings, formats
from twofour.packing.encodings import Encoding
from twofour.packing.formats import WRITE_AGAIN, Format
from twofour.patterns import DENSE, PairedNM, Pattern, parse

FORMAT_VERSION = 1
"""Version of the canonical format and of the headers; readers refuse others."""

HEADER_BYTES = 64
"""Size of a header in front of a kernel's layout; one cache line keeps the data behind it aligned."""

_MAGIC = b"24PK"
_STRUCT = struct.Struct("<4sHH12s12s16sqq")  # magic, version, group, pattern, dtype, layout, rows, columns

_FIELDS = {"pattern", "dtype", "shape", "axis", "layout", "version"}

LARGEST_WEIGHT = 1 << 40
"""Values of a dense weight at most: sizes computed from a header stay far from overflow."""

FORMS = (
    'int4: "4:8-pairs", or (V:)N:M and dense with groups; tf32: "1:2"; every other dtype: (V:)N:M; floats, int8 and '
    "low bits: blocks; floats and int8: N:M+S%; int8 and low bits: dense"
)
"""Which patterns have a packed form in which encoding; `has_form`."""

ZEROS_BIT = 0x8000
"""Set in a layout header's group where the groups have zero points."""


@dataclass(frozen=True)
class Header:
    """Identity of a packed weight.

    Attributes:
        pattern: Text of the pattern, for example "2:4".
        dtype: Encoding of the kept values, the name of one of `packing.encodings`.
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

    @property
    def taps(self) -> int:
        """Rows of one output, one after the other: the positions of a convolution's kernel."""
        others = [size for axis, size in enumerate(self.shape) if axis != self.axis]
        return prod(others[1:])

    @property
    def sparse(self) -> bool:
        """Whether values are left out."""
        return self.pattern != DENSE.name

    @property
    def runs(self) -> int:
        """Scales of a row, where the weight has scales."""
        return self.reduction // self.group if self.group else 1

    @property
    def encoding(self) -> Encoding:
        """How the kept values are written."""
        return encodings.get(self.dtype)

    @property
    def format(self) -> Format:
        """What is stored of the weight: sizes of its parts, and how they are read.

        Raises:
            PackingError: The reduction axis is no multiple of the pattern's group, or there are no values.
        """
        if min(self.shape, default=0) < 1:
            raise _malformed("shape", f"shape {self.shape}", "positive sizes")
        rule = self.parsed()
        if self.reduction % rule.group:
            raise PackingError(
                "the header of a packed weight contradicts itself",
                got=f"pattern {rule.name}, shape {self.shape}, reduction axis {self.axis} of {self.reduction}",
                wanted=f"a reduction axis that is a multiple of {rule.group}",
                remedy=WRITE_AGAIN,
                code="header-reduction",
            )
        form = formats.find(rule)
        assert form is not None, rule
        return form(rule, self.encoding, self.rows, self.reduction, self.taps)

    def parsed(self) -> Pattern:
        """Return the pattern as an object."""
        return read_pattern(self.pattern)

    def to_dict(self) -> dict[str, object]:
        """Return JSON-able fields; `group` only where there are groups."""
        fields: dict[str, object] = {**asdict(self), "shape": list(self.shape)}
        return fields if self.group else {key: value for key, value in fields.items() if key != "group"}

    @classmethod
    def from_dict(cls, fields: object) -> Header:
        """Read and validate fields that came from a file.

        Raises:
            PackingError: A field is missing, of the wrong type, or names something this version cannot read.
        """
        if not _is_object(fields) or set(fields) - {"group"} != _FIELDS:
            got = cut(repr(fields), 200)
            raise _malformed("fields", got, "an object with pattern, dtype, shape, axis, layout and version")
        if type(fields["version"]) is not int or fields["version"] != FORMAT_VERSION:
            raise _malformed("version", f"version {cut(repr(fields['version']), 40)}", f"version {FORMAT_VERSION}")
        if fields["layout"] != "canonical":
            raise _malformed("layout", f"layout {cut(repr(fields['layout']), 40)}", 'layout "canonical"')
        shape, axis, group = _shape(fields["shape"]), fields["axis"], fields.get("group", 0)
        if type(axis) is not int or not 0 <= axis < len(shape):
            raise _malformed("axis", f"shape {shape}, axis {cut(repr(axis), 40)}", "an axis of the shape")
        encoding = _encoding(fields["dtype"], packed=True)
        rule = _form(fields["pattern"], encoding)
        if shape[axis] % rule.group:
            wanted = f"a reduction axis that is a multiple of {rule.group}"
            raise _malformed("reduction", f"shape {shape}, axis {axis}", wanted)
        if refusal := _group_refusal(group, encoding, rule, shape[axis]):
            got = f"group {cut(repr(group), 20)}, {fields['dtype']}, pattern {rule.name}, reduction {shape[axis]}"
            raise _malformed("group", got, refusal)
        return cls(rule.name, fields["dtype"], shape, axis, group=group)


def read_pattern(text: str | Pattern) -> Pattern:
    """Return the pattern that a packed weight is written by: those of `patterns.parse`, and "dense".

    Raises:
        PatternError: It is none.
    """
    return DENSE if text == DENSE.name else parse(text)


def _is_object(found: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(found, dict)


def _is_array(found: object) -> TypeGuard[list[Any]]:
    return isinstance(found, list)


def _shape(found: object) -> tuple[int, ...]:
    if not _is_array(found) or not 1 <= len(found) <= 5 or not all(type(n) is int and n > 0 for n in found):
        raise _malformed("shape", f"shape {cut(repr(found), 80)}", "1 to 5 positive whole numbers")
    if max(found) > LARGEST_WEIGHT or prod(found) > LARGEST_WEIGHT:
        raise _malformed("size", f"shape {cut(repr(found), 80)}", "at most 2^40 values")
    return tuple(found)


def _encoding(dtype: object, *, packed: bool) -> Encoding:
    """Return the encoding of a header; layouts may have one that no packed weight has."""
    allowed = [encoding for encoding in encodings.known() if not (packed and encoding.packed_as)]
    found = encodings.find(dtype)
    if found is None or found not in allowed:
        wanted = ", ".join(encoding.name for encoding in allowed)
        raise _malformed("dtype", f"dtype {cut(repr(dtype), 40)}", wanted)
    return found


def _form(text: object, encoding: Encoding) -> Pattern:
    """Read the pattern of a header, and refuse one that has no packed form in its encoding."""
    try:
        if not isinstance(text, str):
            raise PatternError("a pattern is text")
        rule = read_pattern(text)
    except PatternError as error:
        raise _malformed(
            "pattern", f"pattern {cut(repr(text), 40)}", "the text of a pattern this version knows"
        ) from error
    if not has_form(rule, encoding.name):
        raise _malformed("form", f"pattern {rule.name}, dtype {encoding.name}", FORMS)
    return rule


def _group_refusal(group: object, encoding: Encoding, rule: Pattern, reduction: int) -> str | None:
    """Say what is wanted where a group size means nothing: int4 of N:M needs one, int8 may have one."""
    scaled = encoding.scaled and not isinstance(rule, PairedNM)
    if type(group) is not int or (group and not scaled):
        return "no group: only whole numbers have scales for groups"
    if scaled and encoding.groups and group not in encoding.groups:
        return f"one of {', '.join(map(str, encoding.groups))}"
    if group and (not 0 < group < ZEROS_BIT or reduction % group or group % rule.group):
        return f"a divisor of the reduction and a multiple of {rule.group}"
    return None


def has_form(rule: Pattern, dtype: str) -> bool:
    """Tell whether a pattern has a packed form in an encoding."""
    encoding = encodings.find(dtype)
    return encoding is not None and formats.find(rule) is not None and encoding.takes(rule)


def packed_bytes(header: Header, *, zeros: bool = False) -> int:
    """Return the bytes of a weight in the canonical form: values, indices, scales and zero points.

    Args:
        header: Of a floating-point weight that was packed in this encoding: whole numbers have scales.
        zeros: Whether it has zero points beside its scales, where its encoding has groups.
    """
    encoding = header.encoding
    scales = encoding.scaled + (zeros and bool(encoding.groups))
    return header.format.nbytes + 4 * scales * header.rows * header.runs


def layout_header(
    pattern: str, dtype: str, layout: str, rows: int, columns: int, *, group: int = 0, zeros: bool = False
) -> bytes:
    """Return the 64 bytes that stand in front of a kernel's own layout of a rows x columns weight."""
    scaled = group | (ZEROS_BIT if zeros else 0)
    text = pattern.encode(), dtype.encode(), layout.encode()
    return _STRUCT.pack(_MAGIC, FORMAT_VERSION, scaled, *text, rows, columns)


def layout_head(buffer: Tensor) -> bytes:
    """Return the bytes in front of a kernel's own layout: the first 64 of a buffer, uint8 on any device."""
    return buffer[:HEADER_BYTES].cpu().numpy().tobytes()


def read_layout_header(data: bytes) -> Header:
    """Read what `layout_header` wrote.

    Raises:
        PackingError: The bytes are no such header, or one of another version, type or impossible size.
    """
    if len(data) != HEADER_BYTES or data[:4] != _MAGIC:
        raise _malformed("layout", f"{data[:8]!r} ...", f"{HEADER_BYTES} bytes that start with {_MAGIC!r}")
    _, version, scaled, pattern, dtype, layout, rows, columns = _STRUCT.unpack(data)
    if version != FORMAT_VERSION:
        raise _malformed("version", f"version {version}", f"version {FORMAT_VERSION}")
    text = [field.rstrip(b"\0").decode("ascii", "replace") for field in (pattern, dtype, layout)]
    _encoding(text[1], packed=False)
    if min(rows, columns) < 1 or rows * columns > LARGEST_WEIGHT:
        raise _malformed("shape", f"shape {(rows, columns)}", "positive sizes of at most 2^40 values")
    return Header(text[0], text[1], (rows, columns), 1, text[2], version, scaled & ~ZEROS_BIT)


def has_zeros(data: bytes) -> bool:
    """Tell whether a layout's header says that its groups have zero points."""
    return bool(_STRUCT.unpack(data)[2] & ZEROS_BIT)


def _malformed(part: str, got: str, wanted: str) -> PackingError:
    return PackingError(
        "the header of a packed weight is malformed", got=got, wanted=wanted, remedy=WRITE_AGAIN, code=f"header-{part}"
    )
