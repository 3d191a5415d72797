"""What the libraries' rows add for training, where values move: packing on the GPU, products of a packed left side."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from twofour.errors import KernelError
from twofour.kernels.base import Prepared
from twofour.kernels.cuda import HALVES, CudaKernel
from twofour.packing import Packed

COLUMN_MULTIPLE = 8
"""Columns of a dense 16-bit operand are padded to its multiples (torch.sparse.semi_structured)."""


@dataclass(frozen=True)
class LibraryMatmul(CudaKernel):
    """A row whose 16-bit weights can be packed anew in every training step, without leaving the GPU."""

    @abstractmethod
    def repack(self, values: Tensor, keep: Tensor | None = None) -> Prepared:
        """Pack a matrix on its GPU: what `run` and `run_columns` take.

        Args:
            values: float32, bfloat16 or float16 (out, in), contiguous or the transpose of a contiguous one; rounded to
                the row's type. Sizes that `refill_refuses` takes.
            keep: bool, of the same shape and strides, at most two of four along the rows; None: what is not zero, of
                which there must be at most two of four.
        """

    @abstractmethod
    def _multiply(self, packed: Prepared, rows: int, x: Tensor) -> Tensor:
        """Return W x of the row's type; x (in, columns) of the row's type, columns a multiple of `COLUMN_MULTIPLE`."""

    @abstractmethod
    def _multiples(self) -> tuple[int, int]:
        """Multiples that the sides of a matrix packed here must be."""

    @property
    def refills(self) -> bool:
        """Whether there is `refill`: it packs anew."""
        return True

    def blank(self, keep: Tensor) -> Prepared:
        """Return nothing: `refill` packs from the values and the mask."""
        return Prepared(self, torch.empty(0, dtype=torch.uint8, device=keep.device))

    def refill(self, prepared: Prepared, values: Tensor | Packed, keep: Tensor | None = None) -> Prepared:
        """Return a weight packed anew."""
        assert isinstance(values, Tensor), "kept values alone are the CPU's"
        return self.repack(values, keep)

    def refill_refuses(self, rows: int, columns: int) -> str | None:
        """Return why a matrix of these sizes cannot be packed anew, or None."""
        if self.dtype not in HALVES:
            return f"{self.dtype}: only 16-bit rows are packed anew"
        high, wide = self._multiples()
        if rows % high or columns % wide:
            return f"{rows} x {columns}: multiples of {high} x {wide} are wanted"
        return None

    def run_columns(self, x: Tensor, weight: Prepared, out_features: int, dtype: torch.dtype | None = None) -> Tensor:
        """Multiply; see `Kernel.run_columns`. x is rounded to the row's type.

        Raises:
            KernelError: The row has 8 bits.
        """
        if self.dtype not in HALVES:
            raise KernelError(
                f"{self.name} cannot multiply a packed left side",
                got=self.dtype,
                wanted="bfloat16 or float16",
                remedy="take the row of that type",
            )
        columns = x.shape[1]
        whole = functional.pad(x.to(HALVES[self.dtype]), (0, -columns % COLUMN_MULTIPLE)).contiguous()
        return self._multiply(weight, out_features, whole)[:, :columns].to(dtype or x.dtype).contiguous()
