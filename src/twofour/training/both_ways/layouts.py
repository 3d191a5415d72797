"""The packed forms of one weight: W for the forward product and W^T for the data gradient, on one mask.

On the CPU a layout is made once for a mask and filled again when the weight moves; on a GPU one pass packs both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twofour.kernels import Kernel


@dataclass
class Layouts:
    """Layouts that follow a weight and its mask; nothing is packed twice for one state of the weight.

    Attributes:
        wanted: Product ("forward", "data") -> the row that multiplies, for those that run sparse.
        dtype: Of the values.
    """

    wanted: Mapping[str, Kernel]
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
                name: kernel.blank(keep.t().contiguous() if name == "data" else keep)
                for name, kernel in self.wanted.items()
            }
            self._mask, self._weight = keep._version, None
        state = (weight._version, weight.data_ptr())
        if self._weight != state:
            # One conversion for both: torch's own rounds faster than a refill would.
            values = weight.detach().to(self.dtype).contiguous()
            for name, kernel in self.wanted.items():
                given = (values.t(), keep.t()) if name == "data" else (values, keep)
                self._packed[name] = kernel.refill(self._packed[name], *given)
            self._weight = state
        return self._packed[product]

    @property
    def nbytes(self) -> int:
        """Bytes of the layouts that were built."""
        return sum(packed.nbytes for packed in self._packed.values())
