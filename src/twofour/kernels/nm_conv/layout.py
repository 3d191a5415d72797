"""The weight of a convolution as rows over all its inputs, in the order the kernels walk them, and packed."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.conv import Geometry
from twofour.kernels.nm_matmul import from_layout, hybrid, to_layout
from twofour.packing import HEADER_BYTES, Packed, layout_head, pack, read_layout_header
from twofour.patterns import Hybrid

LAYOUT = "pairs"
"""The layout of nm_matmul that convolutions use; a 1x1 weight is a Linear's, byte for byte."""


def to_rows(weight: Tensor) -> Tensor:
    """Return a weight (out, in, height, width) as (out, height * width * in).

    Inputs stand in the order (kernel row, block of 64 channels, kernel column, channel): a tile of 64 inputs is one tap
    of one block, and the taps of a kernel row, which read the same pixels but for the edges, follow each other.
    """
    out, _, height, _ = weight.shape
    blocks = torch.split(weight, native.extension().conv_block, 1)
    return torch.cat([block.permute(0, 2, 3, 1).reshape(out, height, -1) for block in blocks], 2).reshape(out, -1)


def to_turned_rows(weight: Tensor) -> Tensor:
    """Return `to_rows` of the weight turned round: input and output channels exchanged, taps in the opposite order.

    A convolution of dL/dz with it is the data gradient of stride 1. One pass over the weight, where flipping and
    transposing it before would take three.
    """
    out, _, height, width = weight.shape
    step = native.extension().conv_block
    parts = [
        weight[block : block + step, :, row, column].t()
        for row in reversed(range(height))
        for block in range(0, out, step)
        for column in reversed(range(width))
    ]
    return torch.cat(parts, 1)


def from_rows(rows: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Undo `to_rows`: (out, height * width * channels) to (out, channels, height, width)."""
    block = native.extension().conv_block
    sizes = [min(block, channels - start) for start in range(0, channels, block)]
    parts = torch.split(rows.view(len(rows), height, -1), [size * width for size in sizes], 2)
    return torch.cat(
        [
            part.reshape(len(rows), height, width, size).permute(0, 3, 1, 2)
            for part, size in zip(parts, sizes, strict=True)
        ],
        1,
    ).contiguous()


DUAL = hybrid.PREFIX + LAYOUT
"""The layout of a weight with dense groups, of a convolution without groups of channels."""


def to_conv_layout(weight: Tensor, geometry: Geometry, regions: Hybrid | None = None) -> Tensor:
    """Write a 2:4 weight (out, in / groups, height, width) in the kernels' layout.

    Args:
        weight: The weight.
        geometry: Of the convolution.
        regions: 2:4 and the share of dense groups, which stand at any place of the kernel; None: 2:4.

    Returns:
        uint8: per group of channels a 64-byte header and the bytes of the layout "pairs"; those of `DUAL` with regions.

    Raises:
        PackingError: The weight does not obey the pattern along axis 1.
    """
    rows = to_rows(weight.detach().float())
    if regions is not None:
        return hybrid.to_layout(pack(rows, regions), DUAL)
    rows = rows.chunk(geometry.groups)
    parts = [to_layout(pack(part.contiguous(), "2:4"), LAYOUT) for part in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def from_conv_layout(buffer: Tensor, geometry: Geometry, shape: tuple[int, ...] | None = None) -> Packed:
    """Read what `to_conv_layout` wrote back into the canonical form of a weight (out, in / groups, height, width).

    Args:
        buffer: The bytes.
        geometry: Of the convolution.
        shape: Of the answer: without its height for a Conv1d.

    Raises:
        PackingError: The buffer has no header of this version.
    """
    found = read_layout_header(layout_head(buffer))
    read = hybrid.from_layout if found.layout == DUAL else from_layout
    parts = [read(part).unpack() for part in buffer.chunk(geometry.groups)]
    channels, (height, width) = geometry.in_channels // geometry.groups, geometry.kernel
    dense = from_rows(torch.cat(parts), channels, height, width)
    return pack(dense if shape is None else dense.view(shape), found.pattern, axis=1)


def group_bytes(geometry: Geometry) -> int:
    """Return the bytes of one group's header and layout."""
    rows = geometry.out_channels // geometry.groups
    return HEADER_BYTES + native.extension().layout_bytes(LAYOUT, rows, geometry.columns, 0, False)
