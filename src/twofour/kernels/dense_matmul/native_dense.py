"""Rows of dense_matmul.inc: dense products of our own, on weights behind a 64-byte header."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.base import Prepared, row_numbers
from twofour.kernels.native_product import NativeProduct, foreign
from twofour.native import pages
from twofour.native.surroundings import plain
from twofour.packing import HEADER_BYTES, Packed, dense_of, layout_head, layout_header, read_layout_header


def panel() -> int:
    """Return the outputs of a panel: kDensePanel of dense_matmul.h."""
    return native.extension().dense_panel


@dataclass(frozen=True)
class NativeDenseMatmul(NativeProduct):
    """One row: y = x @ W.T + bias with W dense; kinds of weights say how it is prepared and restored."""

    def _call(self) -> Callable[..., bool]:
        return native.extension().dense_matmul


@dataclass(frozen=True)
class PanelMatmul(NativeDenseMatmul):
    """W in panels of 32 outputs; side by side for each of them one dword of its row, then the next.

    A dword holds a float32, two bfloat16 or four int8 values; rows are filled up with zeros.
    """

    looks_up: ClassVar[bool] = True

    @property
    def value(self) -> torch.dtype:
        """What a value is stored as."""
        return getattr(torch, self.dtype)

    def dwords(self, in_features: int) -> int:
        """Return the dwords of a row."""
        return -(-in_features * self.value.itemsize // 4)

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of header and panels, of whole numbers with a scale and a sum of each row."""
        beside = 2 if self.dtype == "int8" else 0
        return HEADER_BYTES + 4 * (self.dwords(in_features) + beside) * (out_features + -out_features % panel())

    def written(self, values: Tensor, *beside: Tensor) -> Prepared:
        """Return a weight behind its header: uint8.

        Args:
            values: (out, in), of this row's dtype.
            beside: What stands before the panels, a dword for each output.
        """
        rows, columns = values.shape
        buffer = pages.empty(self.least_bytes(rows, columns))
        head = layout_header("dense", self.dtype, self.layout, rows, columns)
        buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        dwords, per = self.dwords(columns), 4 // values.element_size()
        padded = torch.nn.functional.pad(values, (0, dwords * per - columns, 0, -rows % panel()))
        for place, part in enumerate(beside):
            self._beside(buffer, place, len(padded), part.dtype).copy_(
                torch.nn.functional.pad(part, (0, len(padded) - rows))
            )
        self._panels(buffer, rows, columns).copy_(padded.view(-1, panel(), dwords, per).transpose(1, 2))
        return Prepared(self, buffer)

    def values(self, prepared: Prepared) -> Tensor:
        """Return what `written` was given: (out, in), of this row's dtype."""
        rows, columns = read_layout_header(layout_head(prepared.tensor)).shape
        panels = self._panels(prepared.tensor, rows, columns).transpose(1, 2)
        return panels.reshape(len(panels) * panel(), -1)[:rows, :columns].contiguous()

    def rows(self, prepared: Prepared, places: Tensor, width: int) -> Tensor:
        """Return rows of the weight; see `Kernel.rows`."""
        (places,) = plain("looking up rows of a weight", places)
        answer = torch.empty((*places.shape, width), dtype=self.value, device="cpu")
        order = row_numbers(places).contiguous()
        if not native.extension().dense_rows(self.index, prepared.tensor, order, answer, native.threads()):
            raise foreign(self, prepared.tensor, read_layout_header(layout_head(prepared.tensor)).shape[0], width)
        return answer

    def _panels(self, buffer: Tensor, rows: int, columns: int) -> Tensor:
        count = rows + -rows % panel()
        first = self.least_bytes(rows, columns) - 4 * count * self.dwords(columns)
        flat = buffer[first:].view(self.value)
        return flat.view(-1, self.dwords(columns), panel(), 4 // self.value.itemsize)

    @staticmethod
    def _beside(buffer: Tensor, place: int, count: int, dtype: torch.dtype) -> Tensor:
        first = HEADER_BYTES + 4 * count * place
        return buffer[first : first + 4 * count].view(dtype)


@dataclass(frozen=True)
class RealPanels(PanelMatmul):
    """y = x @ W.T + bias with W dense, of float32 or bfloat16."""

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight in this row's layout: uint8."""
        dense = dense_of(weight)
        return self.written(dense.to(self.value))

    def restore(self, prepared: Prepared) -> Tensor:
        """Return the weight as `prepare` rounded it: (out, in)."""
        return self.values(prepared)
