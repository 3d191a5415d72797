"""The packed forms of one weight: W for the forward product and W^T for the data gradient, on one mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twofour import packing
from twofour.kernels.nm_matmul import refill, to_layout


def build(keep: Tensor, dtype: torch.dtype, layout: str, *, turned: bool) -> Tensor:
    """Return a layout for the mask, its values all one: what `refill` fills.

    Made from the mask, never from the weight: a kept value that is 0 today may move tomorrow.

    Args:
        keep: Bool (out, in), 2:4 along both axes.
        dtype: Of the values.
        layout: A layout that can be refilled.
        turned: Lay out W^T.
    """
    ones = (keep.t().contiguous() if turned else keep).to(torch.float32)
    return to_layout(packing.pack(ones, "2:4", dtype=dtype), layout)


@dataclass
class Layouts:
    """Layouts that follow a weight and its mask; nothing is packed twice for one state of the weight.

    Attributes:
        wanted: Product ("forward", "data") -> layout, for those that run sparse.
        dtype: Of the values.
    """

    wanted: Mapping[str, str]
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
                name: build(keep, self.dtype, layout, turned=name == "data") for name, layout in self.wanted.items()
            }
            self._mask, self._weight = keep._version, None
        state = (weight._version, weight.data_ptr())
        if self._weight != state:
            # One conversion for both: torch's own rounds faster than a refill would.
            values = weight.detach().to(self.dtype).contiguous()
            for name, layout in self.wanted.items():
                refill(self._packed[name], layout, values.t() if name == "data" else values)
            self._weight = state
        return self._packed[product]

    @property
    def nbytes(self) -> int:
        """Bytes of the layouts that were built."""
        return sum(packed.nbytes for packed in self._packed.values())
