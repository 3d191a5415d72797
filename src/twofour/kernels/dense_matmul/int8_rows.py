"""Dense int8 weights in panels: a range for each token, as the sparse int8 rows have it, and exact sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Prepared
from twofour.kernels.dense_matmul.int8 import stored_rows, whole_rows
from twofour.kernels.dense_matmul.native_dense import PanelMatmul, panel
from twofour.packing import Packed, layout_head, read_layout_header


def longest() -> int:
    """Return of how many inputs sums fit int32 where all may be kept: kLongestWhole of dense_matmul/bind.cc."""
    return native.extension().dense_longest_whole


@dataclass(frozen=True)
class Int8Panels(PanelMatmul):
    """y = x @ W.T + bias with W dense, int8, one scale a row; x becomes unsigned bytes by the range of each token."""

    def fits(self, rows: int, columns: int) -> bool:
        """Whether sums of this many inputs fit int32: all of them may be kept, where 2:4 keeps half."""
        return columns <= longest()

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight in this row's layout: uint8.

        Args:
            weight: Packed, or floating (out, in), which is rounded symmetrically per row.

        Raises:
            KernelError: Sums of so many inputs may exceed int32.
        """
        whole, scales = whole_rows(weight)
        if not self.fits(*whole.shape):
            raise KernelError(
                "sums of a weight's products may exceed int32",
                got=f"{whole.shape[1]} inputs",
                wanted=f"at most {longest()} (127 x 255 each)",
                remedy="compute in float32 or bfloat16, or split the layer by its inputs",
            )
        return self.written(whole, scales, whole.sum(1, dtype=torch.int32))

    def restore(self, prepared: Prepared) -> Tensor:
        """Return the weight as `prepare` rounded it: float32 (out, in)."""
        whole, scales = self._rows(prepared)
        return whole.float() * scales[:, None]

    def stored(self, prepared: Prepared) -> Packed | Tensor:
        """Return whole numbers and scales; see `Kernel.stored`."""
        return stored_rows(*self._rows(prepared))

    def scales(self, prepared: Prepared) -> Tensor:
        """Return a scale of each row; see `Kernel.scales`."""
        rows = read_layout_header(layout_head(prepared.tensor)).shape[0]
        return self._beside(prepared.tensor, 0, rows + -rows % panel(), torch.float32)[:rows, None]

    def _rows(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        return self.values(prepared), self.scales(prepared).squeeze(1)
