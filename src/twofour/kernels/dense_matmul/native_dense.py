"""Rows of dense_matmul.inc: dense products of our own, on weights behind a 64-byte header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.operands import together
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.packing import layout_head


@dataclass(frozen=True)
class NativeDenseMatmul(Kernel):
    """One row: y = x @ W.T + bias with W dense; kinds of weights say how it is prepared and restored."""

    index: int

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`. x may have any row stride.

        Raises:
            KernelError: `x`, `bias` or `other` is of another dtype or not on the CPU, or the bytes were made for
                another kernel or another shape.
        """
        y, arguments = self._arguments(x, weight, bias, problem, other)
        if not native.extension().dense_matmul(*arguments, native.threads()):
            raise foreign(self, weight.tensor, problem.rows, x.shape[1])
        return y

    def _arguments(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Return an answer to be written, and what a native call takes up to the number of threads."""
        tokens = x.shape[0]
        problem.epilogue.require(other, (tokens, problem.rows))
        x = _readable(self, x, x.dtype)
        other = None if other is None else _readable(self, other, x.dtype)
        y = torch.empty(tokens, problem.rows, dtype=x.dtype, device="cpu")
        return y, (self.index, x, weight.tensor, bias, y, *problem.epilogue.codes, other)


def _readable(kernel: Kernel, operand: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `operand` with contiguous rows, any distance apart."""
    if operand.dtype not in kernel.reads or operand.dtype != dtype or not operand.is_cpu:
        raise KernelError(
            f"{kernel.name} cannot read its input",
            got=f"an operand of {operand.dtype} on {operand.device}",
            wanted=f"{' or '.join(str(dtype)[6:] for dtype in kernel.reads)} on the CPU",
        )
    return together(operand)


def foreign(kernel: Kernel, weight: Tensor, out_features: int, in_features: int) -> KernelError:
    """Build the error for a weight that another kernel prepared."""
    return KernelError(
        f"{kernel.name} was given bytes made for another kernel",
        got=f"a buffer that starts with {layout_head(weight)[:48]!r}",
        wanted=f"layout {kernel.layout!r} of a dense {kernel.dtype} weight ({out_features}, {in_features})",
        remedy="prepare the weight with kernel.prepare(weight)",
    )
