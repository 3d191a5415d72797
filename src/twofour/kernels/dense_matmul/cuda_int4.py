"""The dense int4 product that torch has on the GPU (`_weight_int4pack_mm`): what 2:4 with int4 values has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.kernels.base import Prepared
from twofour.kernels.cuda import CudaKernel
from twofour.kernels.nm_matmul.cuda import ALIGNED, Part, joined, opened, size
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.native import gpu
from twofour.packing import Packed, dense_of, layout_head, layout_header, read_layout_header
from twofour.packing.encodings import GROUPS, INT4, INT4_LEAST

INNER_TILES = 8
"""Blocks of 16 inputs that the kernel keeps together; 8 is what torch's own quantisation takes."""

_LEAST_COLUMNS = 16 * INNER_TILES


@dataclass(frozen=True)
class TinyMatmul(CudaKernel):
    """bfloat16 inputs, int4 weights with a bfloat16 scale and zero point for each run of inputs."""

    def fits(self, rows: int, columns: int) -> bool:
        """Whether the operator takes a weight of these sizes."""
        return rows % 8 == 0 and columns % _LEAST_COLUMNS == 0

    def _parts(self, rows: int, columns: int, group: int) -> tuple[Part, ...]:
        packed = Part(torch.int32, (rows // 8, columns // _LEAST_COLUMNS, 32, INNER_TILES // 2))
        return packed, Part(torch.bfloat16, (columns // group, rows, 2))

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of a prepared weight with the fewest scales."""
        return size(self._parts(out_features, in_features, max(GROUPS)))

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight in torch's order: a packed int4 one with its own scales, a dense one in groups of 64."""
        if isinstance(weight, Packed) and weight.scales is not None and weight.header.group:
            group, scales, zeros = weight.header.group, weight.scales, weight.zeros
            zeros = torch.zeros_like(scales) if zeros is None else zeros
            runs = weight.unpack().view(len(scales), -1, group)
            whole = (runs / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().view(len(scales), -1)
        else:
            dense = dense_of(weight).cpu()
            group = 64
            whole, scales, _ = INT4.quantize(dense.float().contiguous(), group)
            zeros = torch.zeros_like(scales)
        codes = (whole - INT4_LEAST).to(torch.uint8).to(gpu.device())
        packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, 0::2] << 4 | codes[:, 1::2], INNER_TILES)
        scaled = torch.stack((scales, -zeros * scales), -1).transpose(0, 1).contiguous().bfloat16()
        rows, columns = whole.shape
        head = layout_header("dense", "int4", self.layout, rows, columns, group=group)
        return Prepared(self, _marked(joined(head, [packed, scaled]), group))

    def restore(self, prepared: Prepared) -> Tensor:
        """Return the weight as it is multiplied by: float32 (out, in)."""
        rows, columns = read_layout_header(layout_head(prepared.tensor)).shape
        return self.dense(prepared, rows, columns).cpu()

    def dense(self, prepared: Prepared, rows: int, columns: int) -> Tensor:
        """Return the weight as the product of the unit matrix: only the operator knows its order."""
        unit = torch.eye(columns, dtype=torch.bfloat16, device=prepared.tensor.device)
        return self.run(unit, prepared, None, Problem(rows)).float().t()

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`."""
        group = GROUPS[weight.tensor.numel() // ALIGNED % 4]
        packed, scaled = opened(weight.tensor, self._parts(problem.rows, x.shape[1], group), self.name)
        y = torch.ops.aten._weight_int4pack_mm(x.to(torch.bfloat16).contiguous(), packed, group, scaled)
        y = (y if bias is None else y.float() + bias).to(x.dtype)
        return problem.finish(y, other)


def _marked(buffer: Tensor, group: int) -> Tensor:
    """Lengthen the buffer so that its blocks of 256 bytes, modulo 4, say how many inputs share a scale."""
    blocks = (GROUPS.index(group) - buffer.numel() // ALIGNED) % 4
    return torch.cat([buffer, buffer.new_zeros(blocks * ALIGNED)])


TINY_INT4 = TinyMatmul(
    "dense_matmul_int4_tiny__cuda",
    "dense_matmul",
    "dense",
    "int4",
    "cuda",
    "sm_80",
    "cuda_int4",
    (8, 0),
    tokens_most=256,
)
