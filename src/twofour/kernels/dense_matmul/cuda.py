"""Dense products on the GPU, by cuBLAS and torch: what a sparse one has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from twofour.kernels.base import Prepared
from twofour.kernels.cuda import HALVES, CudaKernel, held_bias, padded, rounded_up
from twofour.kernels.dense_matmul.int8 import own_rows
from twofour.kernels.nm_matmul.cuda import TYPES, Part, joined, opened, rescaled, rounded, rounded_reference, size
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.native import gpu
from twofour.packing import Packed, dense_of, layout_head, layout_header, read_layout_header

LEAST_TOKENS = 32
"""`_int_mm` refuses 16 tokens and fewer; beyond, multiples of 8 suit it and `_scaled_mm`."""


@dataclass(frozen=True)
class CublasMatmul(CudaKernel):
    """torch.nn.functional.linear on a weight of float32, bfloat16 or float16."""

    @property
    def torchs(self) -> torch.dtype:
        """Torch's dtype of this name."""
        return HALVES.get(self.dtype, torch.float32)

    def is_own(self, dtype: torch.dtype) -> bool:
        """Whether a layer has this type."""
        return self.torchs is dtype

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of the weight."""
        return self.torchs.itemsize * out_features * in_features

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight (out, in) in the row's type on the current GPU, a copy of its own."""
        dense = dense_of(weight)
        return Prepared(self, dense.to(gpu.device(), self.torchs, copy=True).contiguous())

    def restore(self, prepared: Prepared) -> Tensor:
        """Return the weight (out, in), on the CPU."""
        return prepared.tensor.cpu()

    def dense(self, prepared: Prepared, rows: int, columns: int) -> Tensor:
        """Return the weight itself."""
        return prepared.tensor

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`."""
        y = functional.linear(x.to(self.torchs), weight.tensor, held_bias(bias, problem.rows, self.torchs)).to(x.dtype)
        return problem.finish(y, other)


@dataclass(frozen=True)
class EightBitMatmul(CudaKernel):
    """int8 by `torch._int_mm`, float8 by `torch._scaled_mm`, with scales per token and per output."""

    @property
    def _type(self) -> torch.dtype:
        return TYPES[self.dtype]

    def _parts(self, rows: int, columns: int) -> tuple[Part, ...]:
        high, wide = rounded_up(rows, 16), rounded_up(columns, 16)
        return Part(self._type, (high, wide)), Part(torch.float32, (high,))

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of the padded weight and its scales."""
        return size(self._parts(out_features, in_features))

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight rounded, padded to multiples of 16, with its scales behind it."""
        if self.dtype == "int8" and (own := own_rows(weight)) is not None:
            values, scales = own
        else:
            dense = dense_of(weight).cpu()
            values, scales = rounded_reference(dense, self._type)
        rows, columns = values.shape
        more = rounded_up(rows, 16) - rows, rounded_up(columns, 16) - columns
        values = functional.pad(values.view(torch.int8), (0, more[1], 0, more[0])).view(self._type)
        tensors = [values, functional.pad(scales.flatten(), (0, more[0]), value=1.0)]
        return Prepared(self, joined(layout_header("dense", self.dtype, self.layout, rows, columns), tensors))

    def restore(self, prepared: Prepared) -> Tensor:
        """Return the weight as `prepare` rounded it: float32 (out, in)."""
        rows, columns = read_layout_header(layout_head(prepared.tensor)).shape
        return self.dense(prepared, rows, columns).cpu()

    def dense(self, prepared: Prepared, rows: int, columns: int) -> Tensor:
        """Return the weight as float32 (rows, columns)."""
        values, scales = opened(prepared.tensor, self._parts(rows, columns), self.name)
        return values[:rows, :columns].float() * scales[:rows, None]

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`."""
        tokens, columns = x.shape
        values, scales = opened(weight.tensor, self._parts(problem.rows, columns), self.name)
        whole, scale = rounded(x, self._type)
        wide = padded(whole.view(torch.int8), LEAST_TOKENS if tokens < LEAST_TOKENS else 8, values.shape[1])
        if self.dtype == "int8":
            total = torch.ops.aten._int_mm(wide, values.t())[:tokens, : problem.rows]
            return rescaled(total, scale, scales[: problem.rows], bias, problem.epilogue, other, x.dtype)
        rows = functional.pad(scale, (0, 0, 0, len(wide) - tokens), value=1.0)
        answer = torch.bfloat16  # the only answer of row-wise scales
        y = torch.ops.aten._scaled_mm(wide.view(self._type), values.t(), rows, scales[None, :], out_dtype=answer)
        y = y[:tokens, : problem.rows].float() if bias is not None else y[:tokens, : problem.rows]
        y = (y if bias is None else y + bias).to(x.dtype).contiguous()
        return problem.finish(y, other)


def _cublas(short: str, dtype: str) -> CublasMatmul:
    name = f"dense_matmul_{short}_linear__cuda"
    return CublasMatmul(name, "dense_matmul", "dense", dtype, "cuda", "sm_70", f"cuda_{short}", (7, 0))


def _eight(short: str, dtype: str, isa: str, capability: tuple[int, int]) -> EightBitMatmul:
    name = f"dense_matmul_{short}_scaled__cuda"
    return EightBitMatmul(name, "dense_matmul", "dense", dtype, "cuda", isa, f"cuda_{short}", capability)


CUDA_DENSE = (
    _cublas("f32", "float32"),
    _cublas("bf16", "bfloat16"),
    _cublas("f16", "float16"),
    _eight("int8", "int8", "sm_80", (8, 0)),
    _eight("fp8", "float8", "sm_90", (9, 0)),
)
"""The dense rows of the GPU."""
