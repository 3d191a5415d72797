"""The dense products of float32 called on bfloat16 operands: what a bfloat16 sparse kernel has to beat.

oneDNN uses AMX where the CPU has it, else vdpbf16ps, else float32 arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.dense_matmul.onednn import ONEDNN
from twofour.kernels.dense_matmul.plain import PLAIN
from twofour.kernels.operands import require_memory
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.packing import Packed, dense_of

WHOLE_STEP = 32
"""Columns that AMX multiplies at once in bfloat16; a width that is a multiple of it has no remainder."""

PROBED = 1024
"""Columns from which on the probe tells widths apart by their remainder alone."""


@cache
def reads_past_rows(kernel: Kernel, columns: int) -> bool:
    """Try out whether a float32 row reads past the end of rows of `columns` bfloat16 numbers.

    oneDNN does so on CPUs with AMX where the width is no multiple of 16 (torch 2.13; seen at 33, 65, 100 and 1000
    columns): what stands there, the start of the next token, is multiplied by zero, which a NaN or an infinity
    survives. So one token that is not finite would make another NaN that is.
    """
    if columns % WHOLE_STEP == 0:
        return False
    width = columns if columns < PROBED else PROBED + columns % WHOLE_STEP
    weight = kernel.prepare(torch.ones(64, width, dtype=torch.bfloat16, device="cpu"))
    for tokens in (4, 65):  # few tokens take another path, and rows apart from each other may be copied there
        x = torch.zeros(tokens, 2 * width, dtype=torch.bfloat16, device="cpu")
        x[:, width:] = torch.nan
        apart, x = x[:, :width], x[:, :width].contiguous()
        x[2] = torch.inf
        finite = kernel.run(x, weight, None, Problem(64)).isfinite().all(1)
        if finite.sum() != tokens - 1 or not kernel.run(apart, weight, None, Problem(64)).isfinite().all():
            return True
    return False


@dataclass(frozen=True)
class Bf16Matmul(Kernel):
    """A float32 row on a bfloat16 weight; a float32 input is rounded on the way in and the answer widened.

    Where that row reads past the end of a token, weight and input are widened with zeros until it does not.

    Attributes:
        kernel: The float32 row.
        bias: dtype in which that row wants the bias of a bfloat16 product.
    """

    kernel: Kernel
    bias: torch.dtype

    def unavailable(self) -> str | None:
        """Return why the float32 row cannot run here, or not on bfloat16."""
        if (reason := self.kernel.unavailable()) is None and self.kernel is ONEDNN and not _takes_bfloat16():
            return "oneDNN multiplies bfloat16 on CPUs with AVX-512 (bw, vl, dq) or AVX-NE-CONVERT"
        return reason

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of the weight in bfloat16."""
        return 2 * out_features * in_features

    def remark(self, in_features: int) -> str:
        """Say that the product is widened."""
        if not reads_past_rows(self.kernel, in_features):
            return ""
        wide = in_features + -in_features % WHOLE_STEP
        return f"widened to {wide} columns, or a NaN or infinity of one token would reach the token before"

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight rounded to bfloat16, in the float32 row's order, widened where that row has to be."""
        dense = dense_of(weight)
        dense = dense.to(torch.bfloat16)
        columns = dense.shape[1]
        if not reads_past_rows(self.kernel, columns):
            return self._rounded(dense)
        return replace(self._rounded(pad(dense, (0, -columns % WHOLE_STEP))), columns=columns)

    def _rounded(self, dense: Tensor) -> Prepared:
        return replace(self.kernel.prepare(dense), kernel=self)

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run`. The epilogue of a float32 input is applied to the widened product."""
        low, missing = x.dtype is torch.bfloat16, weight.tensor.shape[1] - x.shape[1]
        if missing > 0 or not low:
            require_memory(x)  # before it is copied; the float32 row looks at its own input
        if missing > 0:  # `prepare` widened the weight
            x = pad(x, (0, missing))
        # oneDNN wants a bias of x's type beside a second operand, and takes float32 elsewhere.
        epilogue = problem.epilogue
        held = torch.bfloat16 if low and epilogue.combine != "none" and epilogue.activation == "none" else self.bias
        bias = None if bias is None else bias.to(held)
        if low:
            return self.kernel.run(x, weight, bias, problem, other)
        y = self.kernel.run(x.to(torch.bfloat16), weight, bias, Problem(problem.rows)).to(x.dtype)
        return problem.finish(y, other)


@cache
def _takes_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


_ROW = ("dense_matmul", "dense", "bfloat16", "cpu", "any")
PLAIN_BF16 = Bf16Matmul("dense_matmul_bf16_linear__torch", *_ROW, PLAIN.layout, PLAIN, torch.bfloat16)
ONEDNN_BF16 = Bf16Matmul("dense_matmul_bf16_prepacked__onednn", *_ROW, ONEDNN.layout, ONEDNN, torch.float32)
