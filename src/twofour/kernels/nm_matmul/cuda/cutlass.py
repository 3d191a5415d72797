"""2:4 products by torch's own CUTLASS kernels (`_sparse_semi_structured_linear`, `_sparse_semi_structured_mm`).

They are Ampere's `mma.sp` kernels, which torch runs on compute capability 8.x alone, without a further library; bias,
ReLU and SiLU of 16-bit products are fused.
The bytes are torch's documented order: kept values, and positions shuffled for the instruction; docs/gpu.md.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.sparse import _semi_structured_conversions as conversions

from twofour.kernels.base import Prepared
from twofour.kernels.cuda import HALVES, held_bias, padded, rounded_up
from twofour.kernels.nm_matmul.cuda.eight_bits import rescaled, rounded
from twofour.kernels.nm_matmul.cuda.library import LibraryMatmul
from twofour.kernels.nm_matmul.cuda.sealed_buffers import Part, joined, opened, size
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.packing import Packed, layout_head, layout_header, read_layout_header
from twofour.tensor_core import Operand, from_sm80, to_sm80

WEIGHT_MULTIPLES = {2: (32, 64), 1: (32, 128)}
"""Bytes of a number -> multiples of the weight's rows and columns: the larger of what products and packing ask."""

TOKEN_MULTIPLE = {2: 8, 1: 16}

FUSED = ("relu", "silu")
"""Activations that torch's operator has."""


@dataclass(frozen=True)
class CutlassMatmul(LibraryMatmul):
    """y = x @ W.T + bias with W 2:4; a bfloat16, float16 or int8 row."""

    def unavailable(self) -> str | None:
        """Return why not: no GPU, one of another generation, or torch without the operators."""
        if not hasattr(torch.ops.aten, "_sparse_semi_structured_linear"):
            return "this build of torch has no _sparse_semi_structured_linear"
        if reason := super().unavailable():
            return reason
        major, minor = torch.cuda.get_device_capability()
        # ATen's SparseSemiStructuredOps.cu and SparseSemiStructuredLinear.cu refuse every other generation.
        return None if major == 8 else f"torch's kernels run on compute capability 8.x, this GPU has {major}.{minor}"

    @property
    def _type(self) -> torch.dtype:
        return HALVES.get(self.dtype, torch.int8)

    def _padded(self, rows: int, columns: int) -> tuple[int, int]:
        high, wide = WEIGHT_MULTIPLES[self._type.itemsize]
        return rounded_up(rows, high), rounded_up(columns, wide)

    def _parts(self, rows: int, columns: int) -> tuple[Part, ...]:
        high, wide = self._padded(rows, columns)
        half = self.dtype in HALVES
        positions = Part(torch.int16, (high, wide // 16)) if half else Part(torch.int32, (high, wide // 32))
        parts = (Part(self._type, (high, wide // 2)), positions)
        return parts if half else (*parts, Part(torch.float32, (high,)))

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight in torch's order on the current GPU, padded, with its scales behind it in int8."""
        assert isinstance(weight, Packed), weight
        rows, columns = weight.header.shape
        operand = Operand.from_packed(weight).padded(*WEIGHT_MULTIPLES[self._type.itemsize])
        tensors = list(to_sm80(operand))
        if self.dtype == "int8":
            scales = (
                torch.ones(rows, dtype=torch.float32, device="cpu")
                if weight.scales is None
                else weight.scales.flatten()
            )
            tensors.append(functional.pad(scales, (0, len(operand.values) - rows), value=1.0))
        return Prepared(self, joined(layout_header("2:4", self.dtype, self.layout, rows, columns), tensors))

    def _multiples(self) -> tuple[int, int]:
        return WEIGHT_MULTIPLES[self._type.itemsize]

    def repack(self, values: Tensor, keep: Tensor | None = None) -> Prepared:
        """Pack in one pass over memory; see `LibraryMatmul.repack`."""
        from twofour.kernels.nm_compress.on_gpu import compress  # imports Triton

        parts = self._parts(*values.shape)
        buffer = torch.empty(size(parts), dtype=torch.uint8, device=values.device)
        out = opened(buffer, parts, self.name)
        compress(values, keep, dtype=self._type, cutlass=True, out=(out[0], out[1]))
        return Prepared(self, buffer)

    def _multiply(self, packed: Prepared, rows: int, x: Tensor) -> Tensor:
        values, positions = opened(packed.tensor, self._parts(rows, len(x)), self.name)
        return torch.ops.aten._sparse_semi_structured_mm(values, positions, x)

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of a prepared weight."""
        return size(self._parts(out_features, in_features))

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`."""
        tokens, columns = x.shape
        high, wide = self._padded(problem.rows, columns)
        values, positions, *scales = opened(weight.tensor, self._parts(problem.rows, columns), self.name)
        if self.dtype not in HALVES:
            whole, scale = rounded(x, torch.int8)
            whole = padded(whole, TOKEN_MULTIPLE[1], wide)
            total = torch.ops.aten._sparse_semi_structured_mm(values, positions, whole.t(), out_dtype=torch.int32).t()
            return rescaled(
                total[:tokens, : problem.rows], scale, scales[0][: problem.rows], bias, problem.epilogue, other, x.dtype
            )
        held = held_bias(bias, high, self._type)
        fused = {"activation": problem.epilogue.activation} if problem.epilogue.activation in FUSED else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the operator deprecated; its successors fuse no activation
            y = torch.ops.aten._sparse_semi_structured_linear(
                padded(x.to(self._type), TOKEN_MULTIPLE[2], wide), values, positions, bias=held, **fused
            )
        y = y[:tokens, : problem.rows].to(x.dtype)
        rest = replace(problem.epilogue, activation="none") if fused else problem.epilogue
        return (y if rest.plain else rest.apply(y, other)).contiguous()

    def dense(self, prepared: Prepared, rows: int, columns: int) -> Tensor:
        """Return the weight (rows, columns): 16-bit in its type, int8 as float32."""
        values, positions, *scales = opened(prepared.tensor, self._parts(rows, columns), self.name)
        weight = cast(Any, conversions).sparse_semi_structured_to_dense_cutlass(values, positions)[:rows, :columns]
        return weight.float() * scales[0][:rows, None] if scales else weight

    def restore(self, prepared: Prepared) -> Packed:
        """Return the canonical form of a prepared weight."""
        rows, columns = read_layout_header(layout_head(prepared.tensor)).shape
        values, positions, *scales = opened(prepared.tensor, self._parts(rows, columns), self.name)
        kind = {"bfloat16": "bf16", "float16": "f16", "int8": "s8"}[self.dtype]
        padded_operand = from_sm80(values.cpu(), positions.cpu(), kind)
        kept = padded_operand.values[:rows, : columns // 2], padded_operand.codes[:rows, : columns // 4]
        packed = Operand(padded_operand.element, *(part.contiguous() for part in kept)).to_packed()
        return replace(packed, scales=scales[0][:rows, None].cpu().contiguous()) if scales else packed


_ROW = ("nm_matmul", "2:4")


def _row(short: str, dtype: str) -> CutlassMatmul:
    return CutlassMatmul(f"nm_matmul_2x4_{short}_cutlass__cuda", *_ROW, dtype, "cuda", "sm_80", f"cutlass_{short}")


CUTLASS = (_row("bf16", "bfloat16"), _row("f16", "float16"), _row("int8", "int8"))
"""The rows of torch's CUTLASS kernels."""
