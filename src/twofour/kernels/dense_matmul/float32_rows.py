"""Dense float32 weights in panels: the dense product of our own, which no library's call stands before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twofour.kernels.base import Prepared
from twofour.kernels.dense_matmul.native_dense import NativeDenseMatmul
from twofour.native import pages
from twofour.packing import HEADER_BYTES, Packed, layout_head, layout_header, read_layout_header

PANEL = 32
"""Outputs of a panel: kDensePanel of f32/panels.h."""


@dataclass(frozen=True)
class Float32Matmul(NativeDenseMatmul):
    """y = x @ W.T + bias with W dense, float32, in panels of 32 outputs, input by input."""

    whole_rows: ClassVar[bool] = True

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of header and panels."""
        return HEADER_BYTES + 4 * in_features * (out_features + -out_features % PANEL)

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight in panels behind a 64-byte header: uint8."""
        dense = (weight.unpack() if isinstance(weight, Packed) else weight.detach()).float()
        rows, columns = dense.shape
        padded = torch.nn.functional.pad(dense, (0, 0, 0, -rows % PANEL))
        buffer = pages.empty(self.least_bytes(rows, columns))
        head = layout_header("dense", self.dtype, self.layout, rows, columns)
        buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        panels = buffer[HEADER_BYTES:].view(torch.float32).view(-1, columns, PANEL)
        panels.copy_(padded.view(-1, PANEL, columns).transpose(1, 2))
        return Prepared(self, buffer)

    def restore(self, prepared: Prepared) -> Tensor:
        """Return the weight: float32 (out, in)."""
        rows, columns = read_layout_header(layout_head(prepared.tensor)).shape
        panels = prepared.tensor[HEADER_BYTES:].view(torch.float32).view(-1, columns, PANEL)
        return panels.transpose(1, 2).reshape(-1, columns)[:rows].contiguous()
