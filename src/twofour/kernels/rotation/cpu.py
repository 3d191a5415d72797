"""Rotary positions on the CPU, float32 or bfloat16: rows of rotation.inc."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.native.surroundings import plain

DTYPES = (torch.float32, torch.bfloat16)
"""Of heads, and of their factors; all arithmetic is float32."""


def rotation(x: Tensor, cos: Tensor, sin: Tensor, begin: int = 0, size: int | None = None) -> Tensor:
    """Return heads turned by their positions: x cos + (the second half of x negated, then the first) sin.

    Args:
        x: (batch, length, columns), float32 or bfloat16: heads side by side, as a product leaves them.
        cos: (length, width), or with axes before these that broadcast to (batch, 1): float32 or bfloat16. All heads
            have `width` columns, an even number.
        sin: As `cos`, of its dtype.
        begin: The first column of the heads.
        size: How many columns they have; None: all that follow.

    Returns:
        (batch, length, size) of x's dtype, contiguous; rounded once.

    Raises:
        KernelError: The operands do not fit.
    """
    x, cos, sin = plain("a rotation", x, cos, sin)
    if x.ndim != 3 or x.dtype not in DTYPES or cos.dtype not in DTYPES or cos.dtype is not sin.dtype:
        given = (("x", x), ("cos", cos), ("sin", sin))
        raise KernelError(
            "the operands of a rotation do not fit",
            got=", ".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in given),
            wanted="float32 or bfloat16: x (batch, length, columns), cos and sin (.., length, width) of one dtype",
            remedy="lay heads side by side (x.transpose(1, 2).flatten(2)), convert factors by .float()",
        )
    part = x if size is None and begin == 0 else x.narrow(-1, begin, x.shape[-1] - begin if size is None else size)
    part = part if part.stride(-1) == 1 else part.contiguous()
    cos, sin = (_by_row(factor, part) for factor in (cos, sin))
    y = torch.empty(part.shape, dtype=part.dtype, device="cpu")
    row = native.best("rotation").index
    native.extension().rotation(row, part, cos, sin, y, cos.shape[-1], native.threads())
    return y


def _by_row(factor: Tensor, x: Tensor) -> Tensor:
    """Return a factor as (batch, length, width), repeated without a copy."""
    rows = factor.flatten(0, -3) if factor.ndim > 2 else factor
    if rows.ndim < 2 or rows.shape[-2] != x.shape[1] or (rows.ndim > 2 and rows.shape[0] not in (1, x.shape[0])):
        raise KernelError(
            "the factors of a rotation do not fit",
            got=f"{tuple(factor.shape)} for rows of {tuple(x.shape)}",
            wanted=f"({x.shape[1]}, width) or (1 or {x.shape[0]}, 1, {x.shape[1]}, width)",
        )
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rows.expand(*x.shape[:2], rows.shape[-1])
