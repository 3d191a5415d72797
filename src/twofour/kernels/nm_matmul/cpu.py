"""Native 2:4 matmul on the CPU: rows of nm_matmul.inc, their layouts and the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.nm_matmul.layout import from_layout, to_layout
from twofour.kernels.operands import together
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.kernels.quantization import LARGEST_REDUCTION
from twofour.packing import HEADER_BYTES, Packed, encodings, layout_head, pack


@dataclass(frozen=True)
class NativeMatmul(Kernel):
    """One row of nm_matmul.inc: y = x @ W.T + bias with W 2:4.

    Pruned positions are skipped: an infinity or NaN in `x` at such a position does not reach the output, except in rows
    of layout "bf16_tiles", which multiply them by zero: there it makes all outputs of its token NaN.
    """

    index: int
    any_axes: ClassVar[bool] = True

    def refuses(self, packed: Packed) -> str | None:
        """Return why not, as `Kernel.refuses`; int8 sums must fit int32."""
        if self.dtype == "int8" and packed.header.reduction > LARGEST_REDUCTION:
            return f"sums of {packed.header.reduction} inputs may exceed int32; at most {LARGEST_REDUCTION}"
        return super().refuses(packed)

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return a canonical 2:4 weight in this row's layout behind a 64-byte header: uint8."""
        assert isinstance(weight, Packed), type(weight)
        return Prepared(self, to_layout(weight, self.layout))

    def restore(self, prepared: Prepared) -> Packed:
        """Return the canonical form of a prepared weight."""
        return from_layout(prepared.tensor)

    def layout_bytes(self, out_features: int, in_features: int, group: int = 0, zeros: bool = False) -> int:
        """Return the bytes of a weight of this size in this row's layout, without the header."""
        return native.extension().layout_bytes(self.layout, out_features, in_features, group, zeros)

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of header and layout."""
        group = max(encodings.get(self.dtype).groups, default=0)  # the fewest scales
        return HEADER_BYTES + self.layout_bytes(out_features, in_features, group)

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`. x may have any row stride.

        Args:
            x: (tokens, in), or contiguous (..., in), of a dtype in `reads`, or uint8 where int8 has a static range.
            weight: What `prepare` returned.
            bias: float32 (out,) or None.
            problem: What is computed.
            other: Second operand of the epilogue.

        Raises:
            KernelError: `x` or `bias` is of another dtype or not on the CPU, `other` does not fit, or the bytes were
                made for another kernel or another shape.
        """
        epilogue, quantization = problem.epilogue, problem.quantization
        if x.dtype is torch.uint8 and self.dtype == "int8" and quantization.dynamic:
            raise _no_range(self)
        *leading, in_features = x.shape
        y = torch.empty((*leading, problem.rows), dtype=quantization.output(x), device="cpu")
        other = None if epilogue.plain else _second_operand(epilogue, other, x, y)
        if not native.extension().nm_matmul(
            self.index,
            x if x.is_contiguous() else together(x),
            weight.tensor,
            bias,
            y,
            *epilogue.codes,
            other,
            *quantization.codes,
            native.threads(),
        ):
            raise _foreign(self, weight.tensor, problem.rows, in_features)
        return y

    @property
    def refills(self) -> bool:
        """Whether its layout is one that a native pass fills again: "panels", "pairs" and "bf16_panels"."""
        return native.extension().layout_refills(self.layout)

    def blank(self, keep: Tensor) -> Prepared:
        """Return the layout of a mask, all its values one."""
        return self.prepare(pack(keep.to(torch.float32), self.pattern, self.dtype))

    def refill(self, prepared: Prepared, values: Tensor, keep: Tensor | None = None) -> Prepared:
        """Write float32 or bfloat16 values into the kept places, in one pass; bfloat16 layouts round float32."""
        native.extension().layout_refill(prepared.tensor, values, native.threads())
        return prepared

    def run_columns(self, x: Tensor, weight: Prepared, out_features: int, dtype: torch.dtype | None = None) -> Tensor:
        """Multiply; see `Kernel.run_columns`. x is float32 or of this row's dtype, its rows contiguous.

        The weight may come from kernels.nm_unbiased; bfloat16 rows can answer in float32 too.

        Raises:
            KernelError: `x` is of another dtype or not on the CPU, or the bytes were made for another kernel or shape.
        """
        x = together(x)
        in_features, columns = x.shape
        y = torch.empty((out_features, columns), dtype=dtype or x.dtype, device="cpu")
        ok = native.extension().nm_matmul_columns(
            self.index,
            x,
            weight.tensor,
            y,
            native.threads(),
        )
        if not ok:
            raise _foreign(self, weight.tensor, out_features, in_features)
        return y


def native_rows() -> list[NativeMatmul]:
    """Return the rows of nm_matmul.inc in their order there."""
    return [
        NativeMatmul(
            *(row.name, row.operation, row.pattern, row.dtype, "cpu", row.isa, row.layout, row.index),
            tokens_least=row.least,
            tokens_most=row.most,
        )
        for row in native.rows("nm_matmul")
    ]


def _second_operand(epilogue: Epilogue, other: Tensor | None, x: Tensor, y: Tensor) -> Tensor | None:
    """Return `other` as the kernel reads it: (tokens, out), its rows contiguous, of y's dtype (float32 where whole)."""
    epilogue.require(other, tuple(y.shape))
    if other is None:
        return None
    given = x.dtype if x.is_floating_point() else torch.float32
    if other.dtype != given or not other.is_cpu:
        raise KernelError(
            "the second operand of an epilogue does not fit",
            got=f"other of {other.dtype} on {other.device}",
            wanted=f"{given} on the CPU",
        )
    other = other.to(y.dtype if y.is_floating_point() else torch.float32)
    other = other if other.ndim == 2 else other.reshape(-1, other.size(-1))
    return together(other)


def _no_range(kernel: NativeMatmul) -> KernelError:
    return KernelError(
        f"{kernel.name} does not know what its input stands for",
        got="x of torch.uint8 without scale and zero point",
        wanted="a static range",
        remedy="pass quantization=Quantization(x_scale, x_zero) to the Problem",
    )


def _foreign(kernel: NativeMatmul, weight: Tensor, out_features: int, in_features: int) -> KernelError:
    head = layout_head(weight)
    return KernelError(
        f"{kernel.name} was given bytes made for another kernel",
        got=f"a buffer that starts with {head[:48]!r}",
        wanted=f"layout {kernel.layout!r} of a 2:4 {kernel.dtype} weight ({out_features}, {in_features})",
        remedy="prepare the weight with kernel.prepare(packed)",
    )
