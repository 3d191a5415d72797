# type: ignore
# The line above: a checker of types takes the kernels for Python, and Triton need not be installed.
"""What happens to a product before it is written, for the Triton kernels of all operations; see `epilogue.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(y, ACTIVATION: tl.constexpr):
    """Return the activation of a tile."""
    if ACTIVATION == "relu":
        y = tl.where(y < 0, 0.0, y)  # not a maximum: NaN stays
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.math.erf(y * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        y = y * tl.sigmoid(2.0 * inner)  # 0.5 (1 + tanh z) = sigmoid(2 z)
    if ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    return y


@triton.jit
def stored(
    acc,
    bias,
    other,
    y,
    token,
    row,
    tokens,
    rows,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COMBINE: tl.constexpr,
):
    """Write epilogue(acc + bias) at (token, row); all are tiles of one shape, or broadcast to it."""
    inside = (token < tokens) & (row < rows)
    if BIAS:
        acc += tl.load(bias + row, mask=row < rows, other=0.0)
    acc = activated(acc, ACTIVATION)
    at = token.to(tl.int64) * rows + row
    if COMBINE == "add":
        acc += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    if COMBINE == "multiply":
        acc *= tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=inside)
