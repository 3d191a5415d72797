# type: ignore
# The line above: a checker of types takes the kernels for Python, and Triton need not be installed.
"""Rounding inputs to 8 bits and rescaling answers, each in one pass over memory, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twofour.kernels.epilogue import Epilogue
from twofour.kernels.epilogue_triton import stored as _stored
from twofour.kernels.quantization import TINY

_COLUMNS = 1024
"""Columns that a program holds at once."""


@triton.jit
def _rounded(
    x, q, scales, columns, stride, LARGEST: tl.constexpr, LEAST: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(values)
    broken = tl.max(tl.where(size < float("inf"), 0, 1), 0)  # NaN is below nothing
    least = tl.full((), LEAST, tl.float32)
    scale = tl.maximum(tl.max(tl.where(size < float("inf"), size, 0.0), 0) / LARGEST, least)
    scaled = tl.where((values == values) & (broken == 0), values / scale, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if WHOLE:
        scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to nearest even
    tl.store(q + row * columns + column, scaled.to(q.dtype.element_ty), mask=inside)
    tl.store(scales + row, tl.where(broken == 0, scale, float("nan")))


@triton.jit
def _rescaled(
    total,
    x_scale,
    w_scale,
    bias,
    other,
    y,
    tokens,
    rows,
    along_tokens,
    along_rows,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COMBINE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    inside = (token < tokens) & (row < rows)
    at = token.to(tl.int64) * along_tokens + row.to(tl.int64) * along_rows
    acc = tl.load(total + at, mask=inside, other=0).to(tl.float32)
    acc *= tl.load(x_scale + token, mask=token < tokens, other=0.0)
    if SCALED:
        acc *= tl.load(w_scale + row, mask=row < rows, other=0.0)
    _stored(acc, bias, other, y, token, row, tokens, rows, BIAS, ACTIVATION, COMBINE)


def rounded(x: Tensor, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    """Do what `eight_bits.rounded_reference` does; a program holds a whole row."""
    x = x if x.stride(1) == 1 else x.contiguous()
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    whole = dtype is torch.int8
    warps = min(16, max(4, block // 1024))
    _rounded[(len(x),)](x, q, scales, x.shape[1], x.stride(0), largest, TINY, whole, block, num_warps=warps)
    return q, scales


def rescaled(
    total: Tensor,
    x_scale: Tensor,
    w_scale: Tensor | None,
    bias: Tensor | None,
    epilogue: Epilogue,
    other: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Do what `eight_bits.rescaled_reference` does; total may have any strides."""
    tokens, rows = total.shape
    y = torch.empty(tokens, rows, dtype=dtype, device=total.device)
    block_tokens = min(32, triton.next_power_of_2(tokens))
    block_rows = min(_COLUMNS, triton.next_power_of_2(rows)) // max(1, block_tokens // 4)
    grid = (triton.cdiv(rows, max(block_rows, 1)), triton.cdiv(tokens, block_tokens))
    _rescaled[grid](
        *(total, x_scale, x_scale if w_scale is None else w_scale, x_scale if bias is None else bias),
        *(y if other is None else other.contiguous(), y, tokens, rows, total.stride(0), total.stride(1)),
        SCALED=w_scale is not None,
        BIAS=bias is not None,
        ACTIVATION=epilogue.activation,
        COMBINE=epilogue.combine,
        TOKENS=block_tokens,
        ROWS=max(block_rows, 1),
    )
    return y
