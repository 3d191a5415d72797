"""The native estimate: a gradient in, a packed 2:4 operand of the weight gradient out."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.packing import HEADER_BYTES, layout_header

LAYOUTS = {torch.float32: "panels", torch.bfloat16: "bf16_panels"}
"""Computing type -> the layout of kernels/nm_matmul that the estimate is written in."""


def nm_unbiased(gradient: Tensor, seed: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Pack an unbiased 2:4 estimate of gradient^T, 2:4 along the tokens.

    Args:
        gradient: float32 or bfloat16 (tokens, columns) on the CPU, tokens a multiple of 4.
        seed: 32 bits; the same seed and gradient give the same bytes, whatever the instruction set and the threads.
        dtype: Type of the values, a key of `LAYOUTS`.
        out: What an earlier call with the same sizes returned, to be written anew.

    Returns:
        uint8: header and bytes of the layout, of a weight (columns, tokens).
    """
    tokens, columns = gradient.shape
    assert tokens % 4 == 0 and gradient.dtype in LAYOUTS, (gradient.shape, gradient.dtype)
    layout, extension = LAYOUTS[dtype], native.extension()
    gradient = gradient if gradient.stride(1) == 1 or columns == 1 else gradient.contiguous()
    if out is None:
        out = torch.empty(
            HEADER_BYTES + extension.layout_bytes(layout, columns, tokens, 0, False), dtype=torch.uint8, device="cpu"
        )
        head = layout_header("2:4", str(dtype).removeprefix("torch."), layout, columns, tokens)
        out[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    extension.nm_unbiased(
        native.best("nm_unbiased").index,
        gradient,
        seed & 0xFFFFFFFF,
        out,
        native.threads(),
    )
    return out
