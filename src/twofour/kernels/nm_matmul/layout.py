"""A packed weight in a kernel's own order of bytes, and back: what layout.inc lists."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.packing import HEADER_BYTES, Header, Packed, layout_header, read_layout_header


def to_layout(packed: Packed, layout: str) -> Tensor:
    """Write a canonical 2:4 weight in a kernel's own layout.

    Args:
        packed: Canonical weight of shape (out, in); every index is validated first.
        layout: A row of layout.inc that is of the weight's dtype.

    Returns:
        uint8: 64-byte header, then the layout's bytes.

    Raises:
        PackingError: The packed weight is inconsistent.
    """
    packed.validate()
    header = packed.header
    extension, rows, columns = native.extension(), header.rows, header.reduction
    assert (header.pattern, header.dtype) == ("2:4", extension.layout_dtype(layout)), (header, layout)
    buffer = torch.empty(HEADER_BYTES + extension.layout_bytes(layout, rows, columns, 0, False), dtype=torch.uint8)
    extension.advise_huge_pages(buffer.data_ptr(), buffer.nbytes)
    head = layout_header("2:4", header.dtype, layout, rows, columns)
    buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    values, indices = packed.values.contiguous(), packed.indices.contiguous()
    extension.layout_pack(
        layout, values.data_ptr(), indices.data_ptr(), 0, 0, rows, columns, 0, buffer.data_ptr() + HEADER_BYTES
    )
    return buffer


def from_layout(buffer: Tensor) -> Packed:
    """Read a kernel's own layout back into the canonical form.

    Raises:
        PackingError: The buffer has no header of this version.
    """
    found = read_layout_header(bytes(buffer[:HEADER_BYTES].tolist()))
    rows, columns = found.shape
    values = torch.empty(rows, columns // 2)
    indices = torch.empty(rows, (columns // 4 + 1) // 2, dtype=torch.uint8)
    native.extension().layout_unpack(
        found.layout, buffer.data_ptr() + HEADER_BYTES, rows, columns, 0, values.data_ptr(), indices.data_ptr(), 0, 0
    )
    return Packed(Header(found.pattern, found.dtype, found.shape, 1), values, indices)
