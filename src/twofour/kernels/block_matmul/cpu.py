"""Native products with weights of blocks on the CPU: rows of block_matmul.inc."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from twofour import native
from twofour.kernels.base import Prepared, rows_of
from twofour.kernels.block_matmul.layout import Grid, from_layout, last_index, to_layout
from twofour.kernels.native_product import NativeProduct
from twofour.kernels.quantization import LARGEST_REDUCTION
from twofour.packing import HEADER_BYTES, Packed
from twofour.packing.encodings import Encoding
from twofour.patterns import Block, Pattern


@dataclass(frozen=True)
class BlockMatmul(NativeProduct):
    """One row of block_matmul.inc: y = x @ W.T + bias with W of R x C blocks, of which some are kept; any R and C.

    An infinity or NaN in `x` reaches the outputs of the blocks that are kept at its place, and no others.
    """

    def takes(self, pattern: Pattern, encoding: Encoding) -> bool:
        """See `Kernel.takes`: blocks of every size."""
        return isinstance(pattern, Block) and encoding.name == self.dtype

    def refuses(self, packed: Packed) -> str | None:
        """Return why not, as `NativeProduct.refuses`; places of inputs are 16 bits."""
        if (reason := super().refuses(packed)) is not None:
            return reason
        if self.dtype == "int8" and packed.header.reduction > LARGEST_REDUCTION // 2:  # all of them may be kept
            return f"sums of {packed.header.reduction} inputs may exceed int32; at most {LARGEST_REDUCTION // 2}"
        if not Grid(packed.header).fits:
            return f"counts inputs with 16 bits, up to {last_index()}; the weight has {packed.header.reduction}"
        return None

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return a canonical weight of blocks in the layout "blocks" behind a 64-byte header: uint8."""
        assert isinstance(weight, Packed), type(weight)
        return Prepared(self, to_layout(weight, self.layout))

    def restore(self, prepared: Prepared) -> Packed:
        """Return the canonical form of a prepared weight."""
        return from_layout(prepared.tensor)

    def _call(self) -> Callable[..., bool]:
        return native.extension().block_matmul

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of both headers and of where the strips of rows begin: blocks may be few."""
        return 2 * HEADER_BYTES + out_features // 16 * 4


def block_rows() -> list[BlockMatmul]:
    """Return the rows of block_matmul.inc in their order there."""
    return rows_of(BlockMatmul, "block_matmul", counted=True)
