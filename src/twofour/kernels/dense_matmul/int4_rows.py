"""Dense int4 weights in groups: what the 2:4 int4 kernels have to beat, in the same layout family."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.base import Prepared
from twofour.kernels.dense_matmul.native_dense import NativeDenseMatmul
from twofour.native import pages
from twofour.packing import (
    HEADER_BYTES,
    Header,
    Packed,
    dense_of,
    has_zeros,
    layout_head,
    layout_header,
    read_layout_header,
)
from twofour.packing.encodings import GROUPS, INT4, dequantize
from twofour.packing.validate import LARGEST_SCALE
from twofour.patterns import DENSE

UNIT, TILE = 32, 32
"""Outputs of a unit of the layout and inputs of a block: kInt4Rows and kInt4Tile of layouts/int4.h."""

GROUP = 64
"""Inputs per scale of a weight that comes as floats."""


@dataclass(frozen=True)
class Int4Matmul(NativeDenseMatmul):
    """y = x @ W.T + bias with W dense, int4, a bfloat16 scale per group of inputs."""

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of header and layout with the largest groups."""
        return HEADER_BYTES + native.extension().dense_int4_bytes(out_features, in_features, max(GROUPS), False)

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight in this row's layout behind a 64-byte header: uint8.

        A packed int4 weight keeps its whole numbers, scales and zero points, zeros written out; any other is rounded
        symmetrically in groups of 64 inputs, 32 where 64 does not divide them.
        """
        whole, scales, zeros, group = _quantized(weight)
        rows, columns = whole.shape
        nibbles = torch.nn.functional.pad(whole, (0, columns % 2)).to(torch.uint8) & 0xF
        values = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        extension = native.extension()
        size = extension.dense_int4_bytes(rows, columns, group, zeros is not None)
        buffer = pages.empty(HEADER_BYTES + size)
        head = layout_header("dense", self.dtype, self.layout, rows, columns, group=group, zeros=zeros is not None)
        buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        extension.dense_int4_pack(buffer, values, scales, zeros)
        return Prepared(self, buffer)

    def restore(self, prepared: Prepared) -> Tensor:
        """Return the weight as `prepare` rounded it: float32 (out, in)."""
        whole, scales, zeros = _opened(prepared.tensor)
        columns = read_layout_header(layout_head(prepared.tensor)).shape[1]
        return dequantize(whole, scales, zeros)[:, :columns].contiguous()

    def stored(self, prepared: Prepared) -> Packed | Tensor:
        """Return whole numbers, scales and zero points packed; see `Kernel.stored`.

        In floats where groups do not divide the inputs, or of a scale beyond those that files take.
        """
        head = read_layout_header(layout_head(prepared.tensor))
        whole, scales, zeros = _opened(prepared.tensor)
        if head.shape[1] % head.group or bool((scales > LARGEST_SCALE).any()):
            return self.restore(prepared)
        nothing = torch.empty(len(whole), 0, dtype=torch.uint8, device="cpu")
        header = Header(DENSE.name, INT4.name, head.shape, 1, group=head.group)
        return Packed(header, INT4.store(whole), nothing, scales, zeros)


def _opened(buffer: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return whole numbers of a layout (kernels/layouts/int4.h), whole groups of inputs, and what groups have.

    int8 (out, groups x group), float32 (out, groups) scales and zero points, None where there are none.
    """
    head = read_layout_header(layout_head(buffer))
    (rows, columns), group, shifted = head.shape, head.group, has_zeros(layout_head(buffer))
    groups, tiles = -(-columns // group), -(-columns // TILE)
    units = buffer[HEADER_BYTES:].view(-(-rows // UNIT), -1)
    scales = units[:, 4 * UNIT : (4 + 2 * groups) * UNIT].contiguous().view(torch.bfloat16)
    zeros = units[:, (4 + 2 * groups) * UNIT :][:, : groups * UNIT] if shifted else None
    lines = units[:, units.shape[1] - tiles * UNIT * TILE // 2 :].reshape(len(units), tiles, 2, 4, 16, 4)
    halves = torch.stack((lines & 0xF, lines >> 4), 4)  # unit, tile, half, eighth, which, lane, value
    whole = halves.permute(0, 2, 5, 1, 3, 4, 6).reshape(len(units) * UNIT, -1)[:rows].to(torch.int8) - 8
    whole = torch.nn.functional.pad(whole, (0, groups * group - whole.shape[1]))

    def of_groups(part: Tensor) -> Tensor:
        return part.view(len(units), groups, UNIT).transpose(1, 2).reshape(-1, groups)[:rows].float().contiguous()

    return whole, of_groups(scales), None if zeros is None else of_groups(zeros.contiguous()) - 8


def group_of(columns: int) -> int:
    """Return how many inputs share a scale of a weight that comes as floats."""
    return GROUP if columns % GROUP == 0 else min(GROUPS)


def _quantized(weight: Packed | Tensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Return whole numbers (out, in), scales and zero points (out, groups) and the group size."""
    if isinstance(weight, Packed) and weight.header.dtype == "int4" and weight.header.group:
        assert weight.scales is not None
        group, scales = weight.header.group, weight.scales
        runs = weight.unpack().view(len(scales), -1, group)
        whole = (runs / scales.unsqueeze(-1)).round()
        if weight.zeros is not None:
            whole += weight.zeros.unsqueeze(-1)
        return whole.view(len(scales), -1), scales, weight.zeros, group
    dense = dense_of(weight)
    columns = dense.shape[1]
    group = group_of(columns)
    padded = torch.nn.functional.pad(dense.float(), (0, -columns % group))
    whole, scales, zeros = INT4.quantize(padded, group)
    return whole[:, :columns], scales, zeros, group
