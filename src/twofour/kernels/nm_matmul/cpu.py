"""Native 2:4 matmul on the CPU: rows of nm_matmul.inc, their layouts and the call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Kernel
from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue
from twofour.kernels.nm_matmul.layout import from_layout, to_layout
from twofour.kernels.nm_matmul.quantization import (
    DYNAMIC,
    LARGEST_REDUCTION,
    Quantization,
    read_range,
    write_range,
)
from twofour.packing import HEADER_BYTES, Packed, encodings

READS = {
    "float32": (torch.float32,),
    "bfloat16": (torch.float32, torch.bfloat16),
    "int4": (torch.float32, torch.bfloat16),
    "int8": (torch.float32, torch.bfloat16, torch.uint8),
}
"""Computing type -> the dtypes of x its rows read."""


@dataclass(frozen=True)
class NativeMatmul(Kernel):
    """One row of nm_matmul.inc: y = x @ W.T + bias with W 2:4.

    `tokens_min` and `tokens_max` bound where the row can win; it is correct for every token count.
    Pruned positions are skipped: an infinity or NaN in `x` at such a position does not reach the output, except in rows
    of layout "bf16_tiles", which multiply them by zero: there it makes all outputs of its token NaN.
    """

    index: int
    tokens_min: int
    tokens_max: int

    def refuses(self, packed: Packed) -> str | None:
        """Return why not, as `Kernel.refuses`; int8 sums must fit int32."""
        if self.dtype == "int8" and packed.header.reduction > LARGEST_REDUCTION:
            return f"sums of {packed.header.reduction} inputs may exceed int32; at most {LARGEST_REDUCTION}"
        return super().refuses(packed)

    def prepare(self, weight: Packed | Tensor, quantization: Quantization = DYNAMIC) -> Tensor:
        """Return `weight` in this row's layout behind a 64-byte header: uint8.

        Args:
            weight: Canonical 2:4 weight.
            quantization: int8: the input range that calls without one of their own use.
        """
        assert isinstance(weight, Packed), type(weight)
        layout = to_layout(weight, self.layout)
        if not quantization.dynamic:
            assert self.dtype == "int8", self.dtype
            write_range(layout[HEADER_BYTES:], quantization)
        return layout

    def restore(self, prepared: Tensor) -> Packed:
        """Return the canonical form of a prepared weight."""
        return from_layout(prepared)

    def layout_bytes(self, out_features: int, in_features: int, group: int = 0, zeros: bool = False) -> int:
        """Return the bytes of a weight of this size in this row's layout, without the header."""
        return native.extension().layout_bytes(self.layout, out_features, in_features, group, zeros)

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of header and layout."""
        group = max(encodings.get(self.dtype).groups, default=0)  # the fewest scales
        return HEADER_BYTES + self.layout_bytes(out_features, in_features, group)

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_features: int,
        epilogue: Epilogue = PLAIN_EPILOGUE,
        other: Tensor | None = None,
        quantization: Quantization = DYNAMIC,
    ) -> Tensor:
        """Multiply; see `Kernel.run`. x may have any row stride.

        Args:
            x: (tokens, in), or contiguous (..., in), of one of the dtypes in `READS`; uint8 needs a static range.
            weight: What `prepare` returned.
            bias: float32 (out,) or None.
            out_features: Rows of W.
            epilogue: What happens to the product before it is stored.
            other: Second operand of the epilogue.
            quantization: int8: the input's range, else that given to `prepare`; and the dtype of the answer.

        Raises:
            KernelError: `x` or `bias` is of another dtype or not on the CPU, `other` does not fit, or the bytes were
                made for another kernel or another shape.
        """
        if x.dtype is torch.uint8 and self.dtype == "int8":
            _require_range(self, weight, quantization)
        *leading, in_features = x.shape
        y = torch.empty((*leading, out_features), dtype=quantization.output(x), device="cpu")
        other = None if epilogue.plain else _second_operand(epilogue, other, x, y)
        if not native.extension().nm_matmul(
            self.index,
            x if x.is_contiguous() else _rows_apart(x),
            weight,
            bias,
            y,
            *epilogue.codes,
            other,
            *quantization.codes,
            native.threads(),
        ):
            raise _foreign(self, weight, out_features, in_features)
        return y

    def run_columns(self, x: Tensor, weight: Tensor, out_features: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return W @ x with both activations transposed: rows of layouts "panels", "pairs" and "bf16_panels".

        Args:
            x: (in, columns), float32 or this row's dtype; its rows contiguous.
            weight: What `prepare` returned, or kernels.nm_unbiased.
            out_features: Rows of W.
            dtype: Of the answer, x's by default; bfloat16 rows can answer in float32 too.

        Returns:
            (out, columns), contiguous.

        Raises:
            KernelError: `x` is of another dtype or not on the CPU, or the bytes were made for another kernel or shape.
        """
        x = x if x.stride(1) == 1 or x.size(1) == 1 else x.contiguous()
        in_features, columns = x.shape
        y = torch.empty((out_features, columns), dtype=dtype or x.dtype, device="cpu")
        ok = native.extension().nm_matmul_columns(
            self.index,
            x,
            weight,
            y,
            native.threads(),
        )
        if not ok:
            raise _foreign(self, weight, out_features, in_features)
        return y


def native_rows() -> list[NativeMatmul]:
    """Return the rows of nm_matmul.inc in their order there."""
    return [
        NativeMatmul(
            row.name, row.operation, row.pattern, row.dtype, "cpu", row.isa, row.layout, row.index, row.least, row.most
        )
        for row in native.rows("nm_matmul")
    ]


def _rows_apart(x: Tensor) -> Tensor:
    """Return (tokens, in) with contiguous rows, any distance apart."""
    assert x.ndim == 2, tuple(x.shape)
    return x if x.stride(1) == 1 or x.size(1) == 1 else x.contiguous()


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
    return other if other.stride(1) == 1 or other.size(1) == 1 else other.contiguous()


def _require_range(kernel: NativeMatmul, weight: Tensor, quantization: Quantization) -> None:
    if quantization.dynamic and read_range(weight[HEADER_BYTES:]).dynamic:
        raise KernelError(
            f"{kernel.name} does not know what its input stands for",
            got="x of torch.uint8 without scale and zero point",
            wanted="a static range",
            remedy="pass quantization=Quantization(x_scale, x_zero) to run or to prepare",
        )


def _foreign(kernel: NativeMatmul, weight: Tensor, out_features: int, in_features: int) -> KernelError:
    head = bytes(weight[:HEADER_BYTES].tolist())
    return KernelError(
        f"{kernel.name} was given bytes made for another kernel",
        got=f"a buffer that starts with {head[:48]!r}",
        wanted=f"layout {kernel.layout!r} of a 2:4 {kernel.dtype} weight ({out_features}, {in_features})",
        remedy="prepare the weight with kernel.prepare(packed)",
    )
