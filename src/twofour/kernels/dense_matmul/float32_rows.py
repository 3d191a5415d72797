"""Dense float32 weights in panels: the dense product of our own, which no library's call stands before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.base import Prepared
from twofour.kernels.dense_matmul.native_dense import NativeDenseMatmul, foreign
from twofour.kernels.norm import RowNorm
from twofour.kernels.problem import MaybeTensor, Problem
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

    def run_normed(
        self,
        x: Tensor,
        weight: Prepared,
        bias: MaybeTensor,
        problem: Problem,
        other: MaybeTensor,
        norm: RowNorm,
        *,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        """Multiply and normalise each row of the answer while it is in a cache; see `run` and `kernels.norm.norm`.

        Args:
            x: float32 (tokens, in).
            weight: As prepared.
            bias: float32 (out,) or None.
            problem: Rows and epilogue.
            other: Second operand of the epilogue.
            norm: What follows.
            keep: Whether the product is wanted beside its norm; else the norm is left in its place.

        Returns:
            The product, and its norm; the same tensor unless `keep`.

        Raises:
            KernelError: As `run`.
        """
        y, arguments = self._arguments(x, weight, bias, problem, other)
        normed = torch.empty_like(y) if keep else y
        after = _norm_row(), norm.weight, norm.bias, normed, norm.eps, norm.centred, native.threads()
        if not native.extension().dense_matmul_normed(*arguments, *after):
            raise foreign(self, weight.tensor, problem.rows, x.shape[1])
        return y, normed

    def run_of_normed(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor, norm: RowNorm
    ) -> Tensor:
        """Multiply the normalised rows of x, each of which is normalised right before it is packed; see `run`.

        Raises:
            KernelError: As `run`.
        """
        y, arguments = self._arguments(x, weight, bias, problem, other)
        before = _norm_row(), norm.weight, norm.bias, norm.eps, norm.centred, native.threads()
        if not native.extension().dense_matmul_of_normed(*arguments, *before):
            raise foreign(self, weight.tensor, problem.rows, x.shape[1])
        return y


def _norm_row() -> int:
    return native.best("norm", dtype="float32").index
