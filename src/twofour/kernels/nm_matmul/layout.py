"""A packed weight in a kernel's own order of bytes, and back: what layout.inc lists."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.errors import PackingError
from twofour.native import pages
from twofour.packing import HEADER_BYTES, Header, Packed, has_zeros, layout_head, layout_header, read_layout_header

DENSEST = 4
"""Values of the dense weight that a byte of a layout holds at most: int4, half of them pruned."""


LARGEST_SCALE = 2.0**80
"""Of int4: the sum of 2^20 inputs of 16 bits by weights of 4, scaled, is below 2^122, so that no float32 overflows."""


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
    extension.layout_pack(buffer, *(part.contiguous() if part is not None else None for part in _parts(packed)))
    return buffer


def from_layout(buffer: Tensor) -> Packed:
    """Read a kernel's own layout back into the canonical form.

    Raises:
        PackingError: The buffer has no header of this version, or one of another pattern or a far larger weight.
        KernelError: It is none of the bytes that its header says.
    """
    head = layout_head(buffer)
    found = read_layout_header(head)
    rows, columns = found.shape
    # Before memory is asked for; the border compares sizes exactly.
    if found.pattern != "2:4" or rows * columns > DENSEST * buffer.numel():
        raise PackingError(
            "the bytes of a prepared weight do not fit their header",
            got=f"{buffer.numel()} bytes, a header of {found.pattern!r}, shape {found.shape}",
            wanted=f"2:4, and a byte for {DENSEST} values at least",
            remedy="prepare or load the weight again",
            code="layout-size",
        )
    header = Header(found.pattern, found.dtype, found.shape, 1, group=found.group)
    parts = header.format.parts.values()
    scaled = header.encoding.scaled, has_zeros(head)
    packed = Packed(
        header,
        *(torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in parts),
        *(torch.empty(rows, header.runs, device="cpu", dtype=torch.float32) if there else None for there in scaled),
    )
    native.extension().layout_unpack(buffer, *_parts(packed))
    return packed


def _require_scales(packed: Packed) -> None:
    if not packed.header.encoding.groups:
        return
    scales, group = packed.scales, packed.header.group
    if group == 0 or scales is None or not torch.equal(scales, scales.bfloat16().float()):
        raise PackingError(
            "the layout of an int4 weight cannot hold its scales",
            got="no groups" if group == 0 else "scales that are no bfloat16 numbers",
            wanted="a bfloat16 scale for each group of inputs",
            remedy='pack the weight again from floating point: pack(weight, "2:4", "int4")',
        )
    if scales.numel() and scales.abs().max() > LARGEST_SCALE:
        raise PackingError(
            "the kernels of an int4 weight cannot compute with its scales",
            got=f"a scale of {scales.abs().max().item():g}",
            wanted=f"scales up to {LARGEST_SCALE:g}: sums of whole numbers come before them, and stay finite",
            remedy="keep this layer in float32, or look at its weight: such values are seldom meant",
        )


def _parts(packed: Packed) -> tuple[Tensor | None, ...]:
    return packed.values, packed.indices, packed.scales, packed.zeros
