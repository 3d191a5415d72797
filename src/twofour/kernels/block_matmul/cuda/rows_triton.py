# type: ignore
# The line above: a checker of types takes the kernels for Python, and Triton need not be installed.
"""The Triton kernel of blocks: each kept block of a row of blocks is one product of tensor cores; see `rows.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from twofour.kernels.block_matmul.cuda.rows import BlockRows
from twofour.kernels.epilogue import Epilogue
from twofour.kernels.epilogue_triton import stored
from twofour.native import gpu


@triton.jit
def _row_of_blocks(
    x, values, starts, columns, bias, other, y, tokens, outputs, inputs, of_part, down,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
    TOKENS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    r, c = tl.arange(0, R), tl.arange(0, C)
    first, end = tl.load(starts + number), tl.load(starts + number + 1)
    acc = tl.zeros((TOKENS, R), tl.float32)
    # The interpreter has no loop up to a number that was loaded: there MOST is the longest row's, else 0.
    for step in range(0, MOST if MOST else end - first):
        block = first + step
        there = block < end
        column = tl.load(columns + block, mask=there, other=0) * C + c
        inside = (token < tokens) & (column[None, :] < inputs) & there
        at = token.to(tl.int64) * inputs + column[None, :]
        a = tl.load(x + at, mask=inside, other=0.0)
        # (C, R): W transposed, as the product reads it.
        w = tl.load(values + block.to(tl.int64) * R * C + r[None, :] * C + c[:, None], mask=there, other=0.0)
        if MOST:  # it multiplies bfloat16 wrongly
            acc += tl.dot(a.to(tl.float32), w.to(tl.float32))
        else:
            acc = tl.dot(a, w, acc)
    part = number // down
    inside_part = (number % down) * R + r
    # An output beyond its part, which the last block of the part reaches over, is none of this row's.
    row = tl.where(inside_part < of_part, part * of_part + inside_part, outputs)[None, :]
    stored(acc, bias, other, y, token, row, tokens, outputs, BIAS, ACTIVATION, COMBINE)


def launch(
    x: Tensor,
    weight: BlockRows,
    bias: Tensor | None,
    other: Tensor | None,
    y: Tensor,
    epilogue: Epilogue,
    block_tokens: int,
) -> None:
    """Fill y (tokens, out) with epilogue(x @ W.T + bias); see `multiply`."""
    rule, rows = weight.pattern, len(weight.starts) - 1
    longest = int(weight.starts.diff().max()) if gpu.interpreted() else 0
    _row_of_blocks[(rows, triton.cdiv(len(x), block_tokens))](
        *(x, weight.values, weight.starts, weight.columns, y if bias is None else bias, y if other is None else other),
        *(y, len(x), *weight.shape, weight.of_part, rows // rule.parts),
        BIAS=bias is not None,
        ACTIVATION=epilogue.activation,
        COMBINE=epilogue.combine,
        TOKENS=block_tokens,
        R=rule.r,
        C=rule.c,
        MOST=longest,
    )
