# type: ignore
# The line above: a checker of types takes the kernels for Python, and Triton need not be installed.
"""The Triton kernels of few tokens: packed 2:4 weights are read once, opened in registers, multiplied by tensor cores.

With few tokens the product takes as long as its weights take to arrive, so they travel packed: 9/16 of bfloat16's
bytes, or 3/8 of a byte a weight (and scales) as int4. A tile of weights becomes four tiles, one for each place in the
groups of four; place p multiplies the inputs 4 g + p. No sparse instruction is involved: Triton has none, and the
arithmetic is not what limits. `few_tokens.py` has the order of the bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twofour.kernels.epilogue_triton import stored as _stored


@triton.jit
def _operand(bits, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Read 16 bits as DTYPE; the interpreter multiplies bfloat16 wrongly, so there they become float32."""
    if INTERPRETED:
        return bits.to(DTYPE, bitcast=True).to(tl.float32)
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def _places(first, second, code):
    """Return the bits at the four places of each group: `first` and `second` where `code` says, else zero."""
    i, j = code & 3, (code >> 2) & 3
    zero = first ^ first
    p0 = tl.where(i == 0, first, zero)
    p1 = tl.where(i == 1, first, tl.where(j == 1, second, zero))
    p2 = tl.where(i == 2, first, tl.where(j == 2, second, zero))
    p3 = tl.where(j == 3, second, zero)
    return p0, p1, p2, p3


@triton.jit
def _dequantize(nibble, scale, zero, DTYPE: tl.constexpr):
    """Return scale * (q - zero) rounded to DTYPE, as bits; `nibble` holds q in its lowest four bits."""
    signed = (nibble & 15) - ((nibble & 8) << 1)
    return ((signed.to(tl.float32) - zero) * scale).to(DTYPE).to(tl.int16, bitcast=True)


@triton.jit
def _weights(
    values, codes, scales, zeros, held, word, padded, runs,
    DTYPE: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return the weights at the four places of the groups that belong to some words of eight, each (rows, groups).

    `held` names the rows, `word` the words of eight groups; the other arguments are those of `few_tokens`.
    """
    place = tl.arange(0, 8)[None, None, :]
    at = held[:, None] * (padded // 8) + word[None, :]
    code = tl.load(codes + at)[:, :, None] >> (4 * place)
    both = tl.load(values + at[:, :, None] * 8 + place)
    if GROUP == 0:
        first, second = both.to(tl.int16), (both >> 16).to(tl.int16)
    else:
        run = held[:, None] * runs + word[None, :] * 32 // GROUP
        scale = tl.load(scales + run).to(tl.float32)[:, :, None]
        zero = scale * 0.0
        if ZEROS:
            zero = tl.load(zeros + run).to(tl.float32)[:, :, None]
        whole = both.to(tl.int32)
        first, second = _dequantize(whole, scale, zero, DTYPE), _dequantize(whole >> 4, scale, zero, DTYPE)
    p0, p1, p2, p3 = _places(first, second, code)
    flat: tl.constexpr = (held.shape[0], word.shape[0] * 8)
    w0 = _operand(tl.reshape(p0, flat), DTYPE, INTERPRETED)
    w1 = _operand(tl.reshape(p1, flat), DTYPE, INTERPRETED)
    w2 = _operand(tl.reshape(p2, flat), DTYPE, INTERPRETED)
    w3 = _operand(tl.reshape(p3, flat), DTYPE, INTERPRETED)
    return w0, w1, w2, w3


@triton.jit
def _inputs(x, group, token, groups, tokens, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the inputs at the four places of each group, each (groups, tokens)."""
    inside = (group < groups)[:, None] & (token < tokens)[None, :]
    four = tl.load(x + token.to(tl.int64)[None, :] * groups + group[:, None], mask=inside, other=0)
    x0 = _operand(four.to(tl.int16), DTYPE, INTERPRETED)
    x1 = _operand((four >> 16).to(tl.int16), DTYPE, INTERPRETED)
    x2 = _operand((four >> 32).to(tl.int16), DTYPE, INTERPRETED)
    x3 = _operand((four >> 48).to(tl.int16), DTYPE, INTERPRETED)
    return x0, x1, x2, x3


@triton.jit
def _step(
    acc, step, x, values, codes, scales, zeros, held, token, tokens, groups, padded, runs,
    DTYPE: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the products of one block of groups."""
    word = step * (GROUPS // 8) + tl.arange(0, GROUPS // 8)
    group = step * GROUPS + tl.arange(0, GROUPS)
    w0, w1, w2, w3 = _weights(values, codes, scales, zeros, held, word, padded, runs, DTYPE, GROUP, ZEROS, INTERPRETED)
    x0, x1, x2, x3 = _inputs(x, group, token, groups, tokens, DTYPE, INTERPRETED)
    acc = tl.dot(w0, x0, acc)
    acc = tl.dot(w1, x1, acc)
    acc = tl.dot(w2, x2, acc)
    return tl.dot(w3, x3, acc)


@triton.jit
def few_tokens(
    x, values, codes, scales, zeros, bias, other, y, partial, tokens, rows, groups, padded, runs, steps,
    DTYPE: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
    PARTIAL: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows by a block of tokens over one part of the inputs.

    Args:
        x: int64 (tokens, groups): the four 16-bit inputs of each group.
        values: int32 (rows, padded): both kept values of a group, the first below; with GROUP uint8, two int4.
        codes: int32 (rows, padded / 8): the positions of eight groups, four bits each.
        scales: bfloat16 (rows, runs), with GROUP.
        zeros: int8 (rows, runs), with GROUP and ZEROS.
        bias: float32 (rows,), with BIAS.
        other: (tokens, rows), with COMBINE.
        y: (tokens, rows).
        partial: float32 (parts, tokens, rows), with PARTIAL written in place of y.
        tokens: Rows of x.
        rows: Rows of the weight.
        groups: Groups of four inputs.
        padded: Groups of a row as they are stored, parts * steps * GROUPS; the added ones hold zeros.
        runs: Scales of a row.
        steps: Blocks of GROUPS in a part.
        DTYPE: Type that is multiplied in.
        GROUP: Inputs that share a scale, or 0: the values are DTYPE.
        ZEROS: Whether there are zero points.
        BIAS: Whether there is a bias.
        ACTIVATION: Of the epilogue.
        COMBINE: Of the epilogue.
        PARTIAL: Whether the inputs are cut into parts, each of which a program of its own sums.
        TOKENS: Tokens of a block.
        ROWS: Rows of a block.
        GROUPS: Groups of a block.
        INTERPRETED: Steps, where Triton's interpreter runs it (3.6 cannot count to a number it was passed); else 0.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    held = tl.minimum(row, rows - 1).to(tl.int64)  # rows behind the last read the last; they are not stored
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    first = tl.program_id(1) * steps
    if INTERPRETED:
        for index in range(INTERPRETED):
            acc = _step(
                acc, first + index, x, values, codes, scales, zeros, held, token, tokens, groups, padded, runs,
                DTYPE, GROUP, ZEROS, GROUPS, INTERPRETED,
            )  # fmt: skip
    else:
        for index in range(steps):
            acc = _step(
                acc, first + index, x, values, codes, scales, zeros, held, token, tokens, groups, padded, runs,
                DTYPE, GROUP, ZEROS, GROUPS, INTERPRETED,
            )  # fmt: skip
    if PARTIAL:
        at = (tl.program_id(1) * tokens + token[None, :]).to(tl.int64) * rows + row[:, None]
        tl.store(partial + at, acc, mask=(token < tokens)[None, :] & (row < rows)[:, None])
    else:
        _stored(acc, bias, other, y, token[None, :], row[:, None], tokens, rows, BIAS, ACTIVATION, COMBINE)


@triton.jit
def summed(
    partial,
    bias,
    other,
    y,
    tokens,
    rows,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COMBINE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the parts of a product in their order and apply the epilogue: the same bits in every run."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) + tl.zeros((ROWS,), tl.int32)
    acc = tl.zeros((ROWS,), tl.float32)
    for part in range(SPLIT):
        at = (part * tokens + token).to(tl.int64) * rows + row
        acc += tl.load(partial + at, mask=row < rows, other=0.0)
    _stored(acc, bias, other, y, token, row, tokens, rows, BIAS, ACTIVATION, COMBINE)
