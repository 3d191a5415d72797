"""int8 and float8 on the GPU: weights rounded once per output, inputs per token while the model runs, answers rescaled.

y[t, o] = x_scale[t] * w_scale[o] * sum + bias[o]. Rounding is symmetric: scale = max |v| / LARGEST, at least `TINY`.
The functions here are plain torch, the reference; `eight_bits_triton.py` does each in one pass where Triton runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.kernels.epilogue import Epilogue
from twofour.kernels.quantization import TINY
from twofour.native import gpu

TYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
"""Computing type -> torch's; float8 is e4m3, which cuSPARSELt and cuBLAS multiply."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Largest magnitude that is used of a type."""


def rounded_reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round each row of x to 8 bits.

    Args:
        x: (rows, columns), floating.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Returns:
        (rows, columns) of `dtype`, and float32 scales (rows, 1); a row with NaN or infinity has the scale NaN.
    """
    wide = x.float()
    scale = (wide.abs().amax(1, keepdim=True) / LARGEST[dtype]).clamp(min=TINY)
    scale = torch.where(torch.isfinite(wide).all(1, keepdim=True), scale, float("nan"))
    scaled = (wide / scale).nan_to_num(0.0).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scale


def rescaled_reference(
    total: Tensor,
    x_scale: Tensor,
    w_scale: Tensor | None,
    bias: Tensor | None,
    epilogue: Epilogue,
    other: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return epilogue(total * x_scale * w_scale + bias) in `dtype`.

    Args:
        total: (tokens, out), any strides and type.
        x_scale: float32 (tokens, 1).
        w_scale: float32 (out,), or None where the product holds it already.
        bias: float32 (out,) or None.
        epilogue: What happens to the product.
        other: Its second operand, (tokens, out), or None.
        dtype: Of the answer.
    """
    y = total.float() * x_scale
    y = y if w_scale is None else y * w_scale
    y = y if bias is None else y + bias
    return epilogue.apply(y, None if other is None else other.float()).to(dtype).contiguous()


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Do what `rounded_reference` does, in one kernel where Triton runs; x is on the GPU."""
    if gpu.runs(x) and x.numel():
        from twofour.kernels.nm_matmul.cuda import eight_bits_triton

        return eight_bits_triton.rounded(x, dtype, LARGEST[dtype])
    return rounded_reference(x, dtype)


def rescaled(
    total: Tensor,
    x_scale: Tensor,
    w_scale: Tensor | None,
    bias: Tensor | None,
    epilogue: Epilogue,
    other: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Do what `rescaled_reference` does, in one kernel where Triton runs."""
    epilogue.require(other, tuple(total.shape))
    if gpu.runs(total) and total.numel():
        from twofour.kernels.nm_matmul.cuda import eight_bits_triton

        return eight_bits_triton.rescaled(total, x_scale, w_scale, bias, epilogue, other, dtype)
    return rescaled_reference(total, x_scale, w_scale, bias, epilogue, other, dtype)
