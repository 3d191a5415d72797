"""Native 2:4 matmul on the CPU: rows of nm_matmul.inc, their layouts and the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.base import Prepared, rows_of
from twofour.kernels.native_product import NativeProduct, foreign
from twofour.kernels.nm_matmul.layout import from_layout, to_layout
from twofour.kernels.operands import together
from twofour.packing import HEADER_BYTES, Packed, encodings, pack


@dataclass(frozen=True)
class NativeMatmul(NativeProduct):
    """One row of nm_matmul.inc: y = x @ W.T + bias with W 2:4."""

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

    def _call(self) -> Callable[..., bool]:
        return native.extension().nm_matmul

    @property
    def refills(self) -> bool:
        """Whether its layout is one that a native pass fills again: "panels", "pairs" and "bf16_panels"."""
        return native.extension().layout_refills(self.layout)

    def blank(self, keep: Tensor) -> Prepared:
        """Return the layout of a mask, all its values one."""
        return self.prepare(pack(keep.to(torch.float32), self.pattern, self.dtype))

    def refill(self, prepared: Prepared, values: Tensor | Packed, keep: Tensor | None = None) -> Prepared:
        """Write float32 or bfloat16 values into the kept places, in one pass; bfloat16 layouts round float32."""
        threads = native.threads()
        if isinstance(values, Packed):
            kept, turned = (values.values, values.indices), values.header.axis == 0
            native.extension().layout_refill_kept(prepared.tensor, *kept, turned, threads)
        else:
            native.extension().layout_refill(prepared.tensor, values, threads)
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
            raise foreign(self, weight.tensor, out_features, in_features)
        return y


def native_rows() -> list[NativeMatmul]:
    """Return the rows of nm_matmul.inc in their order there."""
    return rows_of(NativeMatmul, "nm_matmul", counted=True)
