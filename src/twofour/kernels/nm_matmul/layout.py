"""A packed weight in a kernel's own order of bytes, and back: what layout.inc lists."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.errors import PackingError
from twofour.native import pages
from twofour.packing import DTYPES, HEADER_BYTES, Header, Packed, has_zeros, layout_header, read_layout_header


def to_layout(packed: Packed, layout: str) -> Tensor:
    """Write a canonical 2:4 weight in a kernel's own layout.

    Args:
        packed: Canonical weight of shape (out, in); every index is validated first.
        layout: A row of layout.inc that is of the weight's dtype.

    Returns:
        uint8: 64-byte header, then the layout's bytes.

    Raises:
        PackingError: The packed weight is inconsistent, or the layout cannot hold its scales.
    """
    packed.validate()
    _require_scales(packed)
    header, zeros = packed.header, packed.zeros is not None
    extension, rows, columns = native.extension(), header.rows, header.reduction
    assert (header.pattern, header.dtype) == ("2:4", extension.layout_dtype(layout)), (header, layout)
    size = extension.layout_bytes(layout, rows, columns, header.group, zeros)
    buffer = pages.empty(HEADER_BYTES + size)
    head = layout_header("2:4", header.dtype, layout, rows, columns, group=header.group, zeros=zeros)
    buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    parts = [part.contiguous() if part is not None else None for part in _parts(packed)]
    at = [0 if part is None else part.data_ptr() for part in parts]
    extension.layout_pack(layout, *at, rows, columns, header.group, buffer.data_ptr() + HEADER_BYTES)
    return buffer


def from_layout(buffer: Tensor) -> Packed:
    """Read a kernel's own layout back into the canonical form.

    Raises:
        PackingError: The buffer has no header of this version.
    """
    head = bytes(buffer[:HEADER_BYTES].tolist())
    found = read_layout_header(head)
    rows, columns = found.shape
    header = Header(found.pattern, found.dtype, found.shape, 1, group=found.group)
    whole = found.dtype in ("int8", "int4")
    kept = columns // 4 if found.dtype == "int4" else columns // 2
    runs = columns // found.group if found.group else 1
    packed = Packed(
        header,
        torch.empty(rows, kept, dtype=torch.uint8 if found.dtype == "int4" else DTYPES[found.dtype]),
        torch.empty(rows, (columns // 4 + 1) // 2, dtype=torch.uint8),
        torch.empty(rows, runs, dtype=torch.float32) if whole else None,
        torch.empty(rows, runs, dtype=torch.float32) if has_zeros(head) else None,
    )
    at = [0 if part is None else part.data_ptr() for part in _parts(packed)]
    address = buffer.data_ptr() + HEADER_BYTES
    native.extension().layout_unpack(found.layout, address, rows, columns, found.group, *at)
    return packed


def refill(buffer: Tensor, layout: str, weight: Tensor) -> None:
    """Write new values into a layout whose mask stays: what the kept places of `weight` hold now, in one native pass.

    Args:
        buffer: What `to_layout` returned for a weight of this shape, changed in place.
        layout: Its layout: "panels", "pairs" or "bf16_panels".
        weight: float32 or bfloat16 (out, in) on the CPU, contiguous or the transpose of a contiguous one; values at
            pruned places are ignored. bfloat16 layouts round float32.
    """
    (rows, columns), (down, along) = weight.shape, weight.stride()
    assert weight.is_cpu and weight.dtype in (torch.float32, torch.bfloat16) and min(down, along) == 1, weight.stride()
    native.extension().layout_refill(
        layout,
        weight.data_ptr(),
        weight.dtype is torch.bfloat16,
        down,
        along,
        rows,
        columns,
        buffer.data_ptr() + HEADER_BYTES,
        native.threads(),
    )


def _require_scales(packed: Packed) -> None:
    if packed.header.dtype != "int4":
        return
    scales, group = packed.scales, packed.header.group
    if group == 0 or scales is None or not torch.equal(scales, scales.bfloat16().float()):
        raise PackingError(
            "the layout of an int4 weight cannot hold its scales",
            got="no groups" if group == 0 else "scales that are no bfloat16 numbers",
            wanted="a bfloat16 scale for each group of inputs",
            remedy='pack the weight again from floating point: pack(weight, "2:4", "int4")',
        )


def _parts(packed: Packed) -> tuple[Tensor | None, ...]:
    return packed.values, packed.indices, packed.scales, packed.zeros
