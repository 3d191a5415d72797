"""The native estimate: a gradient in, a packed 2:4 operand of the weight gradient out."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.packing import HEADER_BYTES, layout_header

LAYOUTS = {torch.float32: "panels", torch.bfloat16: "bf16_panels"}
"""Computing type -> the layout of kernels/layouts that the estimate is written in."""


def packed_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return the bytes of a packed gradient, of a weight (rows, columns)."""
    return HEADER_BYTES + native.extension().layout_bytes(LAYOUTS[dtype], rows, columns, 0, False)


def with_header(rows: int, columns: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Return the beginning of `out`, or new bytes, with the header of a packed gradient; the rest is to be written."""
    size = packed_bytes(rows, columns, dtype)
    out = torch.empty(size, dtype=torch.uint8, device="cpu") if out is None else out[:size]
    head = layout_header("2:4", str(dtype).removeprefix("torch."), LAYOUTS[dtype], rows, columns)
    out[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return out


def nm_unbiased(gradient: Tensor, seed: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Pack an unbiased 2:4 estimate of gradient^T, 2:4 along the tokens.

    Args:
        gradient: float32 or bfloat16 (tokens, columns) on the CPU, tokens a multiple of 4.
        seed: 32 bits; the same seed and gradient give the same bytes, whatever the instruction set and the threads.
        dtype: Type of the values, a key of `LAYOUTS`.
        out: uint8, contiguous, of at least `packed_bytes`: what is returned is its beginning.

    Returns:
        uint8: header and bytes of the layout, of a weight (columns, tokens).
    """
    tokens, columns = gradient.shape
    assert tokens % 4 == 0 and gradient.dtype in LAYOUTS, (gradient.shape, gradient.dtype)
    gradient = gradient if gradient.stride(1) == 1 or columns == 1 else gradient.contiguous()
    out = with_header(columns, tokens, dtype, out)
    native.extension().nm_unbiased(
        native.best("nm_unbiased").index,
        gradient,
        seed & 0xFFFFFFFF,
        out,
        native.threads(),
    )
    return out
