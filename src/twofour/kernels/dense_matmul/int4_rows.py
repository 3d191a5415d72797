"""Dense int4 weights in groups: what the 2:4 int4 kernels have to beat, in the same layout family."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.base import Prepared
from twofour.kernels.dense_matmul.native_dense import NativeDenseMatmul
from twofour.kernels.problem import Problem
from twofour.native import pages
from twofour.packing import HEADER_BYTES, Packed, dense_of, layout_head, layout_header, read_layout_header
from twofour.packing.encodings import GROUPS, INT4

RESTORED = 256
"""Columns of a weight that are restored at a time."""

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
        """Return the weight as `prepare` rounded it: float32 (out, in), read column by column by the product itself."""
        rows, columns = read_layout_header(layout_head(prepared.tensor)).shape
        unit = torch.eye(columns, dtype=torch.float32, device="cpu")
        blocks = [
            self.run(unit[first : first + RESTORED], prepared, None, Problem(rows))
            for first in range(0, columns, RESTORED)
        ]
        return torch.cat(blocks).T.contiguous()


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
    group = GROUP if columns % GROUP == 0 else min(GROUPS)
    padded = torch.nn.functional.pad(dense.float(), (0, -columns % group))
    whole, scales, zeros = INT4.quantize(padded, group)
    return whole[:, :columns], scales, zeros, group
