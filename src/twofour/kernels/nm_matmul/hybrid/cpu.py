"""Native products with packed weights of two regions, 2:4 and dense, on the CPU: rows of hybrid.inc."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from torch import Tensor

from twofour import native
from twofour.kernels.base import Prepared, rows_of
from twofour.kernels.native_product import NativeProduct
from twofour.kernels.nm_matmul.hybrid.layout import from_layout, inner_layout, to_layout
from twofour.kernels.quantization import LARGEST_REDUCTION
from twofour.packing import HEADER_BYTES, Packed
from twofour.packing.encodings import Encoding
from twofour.packing.formats import HybridRows
from twofour.patterns import NM, Hybrid, Pattern


def two_regions(pattern: Pattern) -> TypeGuard[Hybrid]:
    """Tell whether a pattern is 2:4 with dense groups of inputs, of any share."""
    return isinstance(pattern, Hybrid) and pattern.regular == NM(2, 4)


@dataclass(frozen=True)
class HybridMatmul(NativeProduct):
    """One row of hybrid.inc: y = x @ W.T + bias with W 2:4 but for groups of inputs that are dense, of any share.

    Pruned positions are skipped, as in rows of 2:4.
    """

    def takes(self, pattern: Pattern, encoding: Encoding) -> bool:
        """See `Kernel.takes`: 2:4 and any share of dense groups."""
        return two_regions(pattern) and encoding.name == self.dtype

    def refuses(self, packed: Packed) -> str | None:
        """Return why not, as `NativeProduct.refuses`; of a dense group twice as many values are summed."""
        form = packed.header.format if self.dtype == "int8" else None
        if isinstance(form, HybridRows) and 2 * form.kept > LARGEST_REDUCTION:
            return f"sums of {form.kept} kept inputs may exceed int32; at most {LARGEST_REDUCTION // 2}"
        return super().refuses(packed)

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return a canonical weight of two regions in this row's layout behind a 64-byte header: uint8."""
        assert isinstance(weight, Packed), type(weight)
        return Prepared(self, to_layout(weight, self.layout))

    def restore(self, prepared: Prepared) -> Packed:
        """Return the canonical form of a prepared weight."""
        return from_layout(prepared.tensor)

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of header and layout of a weight without dense groups."""
        return (
            HEADER_BYTES
            + 64
            + native.extension().layout_bytes(inner_layout(self.layout), out_features, in_features, 0, False)
        )

    def _call(self) -> Callable[..., bool]:
        return native.extension().hybrid_matmul


def hybrid_rows() -> list[HybridMatmul]:
    """Return the rows of hybrid.inc in their order there."""
    return rows_of(HybridMatmul, "hybrid_matmul", counted=True)
