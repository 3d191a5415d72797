"""The packed forms of one weight: W for the forward product and W^T for the data gradient, on one mask.

On the CPU a layout is made once for a mask and filled again when the weight moves; on a GPU one pass packs both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twofour import packing
from twofour.kernels.nm_matmul import NativeMatmul, refill, to_layout
from twofour.training.products import SparseKernel


def build(keep: Tensor, dtype: torch.dtype, kernel: SparseKernel, *, turned: bool) -> Tensor:
    """Return what `fill` fills for a mask: a layout whose values are all one; on a GPU nothing.

    Made from the mask, never from the weight: a kept value that is 0 today may move tomorrow.

    Args:
        keep: Bool (out, in), 2:4 along both axes.
        dtype: Of the values.
        kernel: The row that multiplies.
        turned: Lay out W^T.
    """
    if not isinstance(kernel, NativeMatmul):
        return torch.empty(0, dtype=torch.uint8, device=keep.device)
    ones = (keep.t().contiguous() if turned else keep).to(torch.float32)
    return to_layout(packing.pack(ones, "2:4", dtype=dtype), kernel.layout)


def fill(packed: Tensor, kernel: SparseKernel, values: Tensor, keep: Tensor) -> Tensor:
    """Return the operand with these values: `packed` itself on the CPU, a new one on a GPU.

    Args:
        packed: What `build` or an earlier call returned for this mask.
        kernel: The row that multiplies.
        values: What the weight holds now, or its transpose; values at pruned places are ignored.
        keep: The mask, transposed where the values are.
    """
    if not isinstance(kernel, NativeMatmul):
        return kernel.repack(values, keep)
    refill(packed, kernel.layout, values)
    return packed


@dataclass
class Layouts:
    """Layouts that follow a weight and its mask; nothing is packed twice for one state of the weight.

    Attributes:
        wanted: Product ("forward", "data") -> the row that multiplies, for those that run sparse.
        dtype: Of the values.
    """

    wanted: Mapping[str, SparseKernel]
    dtype: torch.dtype
    _packed: dict[str, Tensor] = field(default_factory=dict)
    _weight: tuple[int, int] | None = None
    _mask: int | None = None

    def forget_values(self) -> None:
        """Fill again at the next use, though the weight's version may be the same: it was written through `.data`."""
        self._weight = None

    def forget_mask(self) -> None:
        """Lay out the mask anew at the next use: it is another tensor."""
        self._mask = None

    def of(self, product: str, weight: Tensor, keep: Tensor) -> Tensor:
        """Return the layout of a product with the values that `weight` has now."""
        if self._mask != keep._version:
            self._packed = {
                name: build(keep, self.dtype, kernel, turned=name == "data") for name, kernel in self.wanted.items()
            }
            self._mask, self._weight = keep._version, None
        state = (weight._version, weight.data_ptr())
        if self._weight != state:
            # One conversion for both: torch's own rounds faster than a refill would.
            values = weight.detach().to(self.dtype).contiguous()
            for name, kernel in self.wanted.items():
                given = (values.t(), keep.t()) if name == "data" else (values, keep)
                self._packed[name] = fill(self._packed[name], kernel, *given)
            self._weight = state
        return self._packed[product]

    @property
    def nbytes(self) -> int:
        """Bytes of the layouts that were built."""
        return sum(packed.nbytes for packed in self._packed.values())
