# type: ignore
# The line above: a checker of types takes the kernels for Python, and Triton need not be installed.
"""The Triton kernels of few tokens: packed 2:4 weights are read once and opened in registers.

With few tokens the product takes as long as its weights take to arrive, so they travel packed: 9/16 of bfloat16's
bytes, or 3/8 of a byte a weight (and scales) as int4. No sparse instruction is involved: Triton has none, and the
arithmetic is not what limits. `few_tokens.py` has the order of the bytes. There are two ways:

* `few_tokens`: a tile of weights is opened to dense, and the ordinary tensor cores multiply it by up to 32 tokens.
* `one_to_four_tokens`: each kept value picks the input that it meets, one byte permutation for both of a group, and is
  multiplied in float32; nothing passes through shared memory but the inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twofour.kernels.epilogue_triton import stored as _stored


@triton.jit
def _half(bits, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Read 16 bits as DTYPE; the interpreter multiplies bfloat16 wrongly, so there they become float32."""
    if INTERPRETED:
        return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return bits.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def _unpack_pair(bits, DTYPE: tl.constexpr):
    """Return the two numbers of 16 bits in an int32 as float32, the lower first."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        return (bits << 16).to(tl.float32, bitcast=True), (bits & -65536).to(tl.float32, bitcast=True)
    first, second = bits.to(tl.int16), (bits >> 16).to(tl.int16)
    return first.to(DTYPE, bitcast=True).to(tl.float32), second.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _dequantized(nibble, scale, zero):
    """Return scale * (q - zero) in float32; `nibble` holds q in its lowest four bits."""
    signed = (nibble & 15) - ((nibble & 8) << 1)
    return (signed.to(tl.float32) - zero) * scale


@triton.jit
def _kept(
    values,
    codes,
    scales,
    zeros,
    held,
    word,
    padded,
    runs,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Return both kept values of the groups in some words of eight, float32 (rows, words, 8), and their positions.

    `held` names the rows, `word` the words of eight groups; the other arguments are those of `few_tokens`.
    """
    place = tl.arange(0, 8)[None, None, :]
    at = held[:, None] * (padded // 8) + word[None, :]
    code = tl.load(codes + at)[:, :, None] >> (4 * place)
    both = tl.load(values + at[:, :, None] * 8 + place)
    if GROUP == 0:
        first, second = _unpack_pair(both, DTYPE)
        return first, second, code
    run = held[:, None] * runs + word[None, :] * 32 // GROUP
    scale = tl.load(scales + run).to(tl.float32)[:, :, None]
    zero = scale * 0.0
    if ZEROS:
        zero = tl.load(zeros + run).to(tl.float32)[:, :, None]
    whole = both.to(tl.int32)
    return _dequantized(whole, scale, zero), _dequantized(whole >> 4, scale, zero), code


@triton.jit
def _weights(first, second, code, DTYPE: tl.constexpr, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the weights that kept values and positions stand for, in DTYPE: (rows, 4 * GROUPS)."""
    u, v = first.to(DTYPE).to(tl.int16, bitcast=True), second.to(DTYPE).to(tl.int16, bitcast=True)
    i, j = code & 3, (code >> 2) & 3
    zero = u ^ u
    p0 = tl.where(i == 0, u, zero)
    p1 = tl.where(i == 1, u, tl.where(j == 1, v, zero))
    p2 = tl.where(i == 2, u, tl.where(j == 2, v, zero))
    p3 = tl.where(j == 3, v, zero)
    # The last axis of an outer join runs fastest: places 0, 1, 2, 3 stand beside each other.
    opened = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return _half(tl.reshape(opened, (first.shape[0], 4 * GROUPS)), DTYPE, INTERPRETED)


@triton.jit
def _step(
    acc, step, x, values, codes, scales, zeros, held, token, tokens, groups, padded, runs,
    DTYPE: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the product of one block of groups."""
    word = step * (GROUPS // 8) + tl.arange(0, GROUPS // 8)
    first, second, code = _kept(values, codes, scales, zeros, held, word, padded, runs, DTYPE, GROUP, ZEROS)
    column = step * GROUPS * 4 + tl.arange(0, GROUPS * 4)
    inside = (column < 4 * groups)[:, None] & (token < tokens)[None, :]
    met = tl.load(x + token.to(tl.int64)[None, :] * (4 * groups) + column[:, None], mask=inside, other=0)
    weights = _weights(first, second, code, DTYPE, GROUPS, INTERPRETED)
    return tl.dot(weights, _half(met, DTYPE, INTERPRETED), acc)


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
        x: int16 (tokens, 4 * groups): the bits of 16-bit inputs.
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
    begin = tl.program_id(1) * steps
    if INTERPRETED:
        for index in range(INTERPRETED):
            acc = _step(
                acc, begin + index, x, values, codes, scales, zeros, held, token, tokens, groups, padded, runs,
                DTYPE, GROUP, ZEROS, GROUPS, INTERPRETED,
            )  # fmt: skip
    else:
        for index in range(steps):
            acc = _step(
                acc, begin + index, x, values, codes, scales, zeros, held, token, tokens, groups, padded, runs,
                DTYPE, GROUP, ZEROS, GROUPS, INTERPRETED,
            )  # fmt: skip
    _written(acc, partial, bias, other, y, token, row, tokens, rows, BIAS, ACTIVATION, COMBINE, PARTIAL)


@triton.jit
def _written(
    acc, partial, bias, other, y, token, row, tokens, rows,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Write a tile of sums (row, token): the answer, or with PARTIAL this part's share of it."""
    if PARTIAL:
        at = (tl.program_id(1) * tokens + token[None, :]).to(tl.int64) * rows + row[:, None]
        tl.store(partial + at, acc, mask=(token < tokens)[None, :] & (row < rows)[:, None])
    else:
        _stored(acc, bias, other, y, token[None, :], row[:, None], tokens, rows, BIAS, ACTIVATION, COMBINE)


@triton.jit
def _select_inputs(low, high, select, INTERPRETED: tl.constexpr):
    """Return two of four inputs of 16 bits, as `select` names their bytes in (low, high): the first one below."""
    if INTERPRETED:
        i, j = (select & 15) >> 1, (select >> 9) & 7
        first = tl.where(i < 2, low, high) >> (16 * (i & 1))
        second = tl.where(j < 2, low, high) >> (16 * (j & 1))
        return (first & 65535) | (second << 16)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, select], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _nan_if_not_finite(two, DTYPE: tl.constexpr):
    """Return zero, or NaN where one of two inputs is infinite or NaN: most rows have a zero there."""
    first, second = _unpack_pair(two, DTYPE)
    return first * 0.0 + second * 0.0


@triton.jit
def _token(
    acc, lost, first, second, select, x, token, tokens, group, groups, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Add one token's products with a block of groups: acc (rows, words, 8); lost (words, 8)."""
    inside = (group < groups) & (token < tokens)
    four = tl.load(x + token.to(tl.int64) * groups + group, mask=inside, other=0)
    low, high = four.to(tl.int32), (four >> 32).to(tl.int32)
    x0, x1 = _unpack_pair(_select_inputs(low[None, :, :], high[None, :, :], select, INTERPRETED), DTYPE)
    acc += first * x0
    acc += second * x1
    return acc, lost + (_nan_if_not_finite(low, DTYPE) + _nan_if_not_finite(high, DTYPE))


@triton.jit
def one_to_four_tokens(
    x, values, codes, scales, zeros, bias, other, y, partial, tokens, rows, groups, padded, runs, steps,
    DTYPE: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
    PARTIAL: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Do what `few_tokens` does, TOKENS 1, 2 or 4, without tensor cores; x is int64 (tokens, groups)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin, one = tl.program_id(1) * steps, tl.program_id(2) * TOKENS
    held = tl.minimum(row, rows - 1).to(tl.int64)
    a0 = tl.zeros((ROWS, GROUPS // 8, 8), tl.float32)
    l0 = tl.zeros((GROUPS // 8, 8), tl.float32)
    a1, a2, a3, l1, l2, l3 = a0, a0, a0, l0, l0, l0
    for index in range(INTERPRETED if INTERPRETED else steps):
        word = (begin + index) * (GROUPS // 8) + tl.arange(0, GROUPS // 8)
        first, second, code = _kept(values, codes, scales, zeros, held, word, padded, runs, DTYPE, GROUP, ZEROS)
        select = 0x1010 + (code & 3) * 0x22 + ((code >> 2) & 3) * 0x2200  # bytes 2 i, 2 i + 1, 2 j and 2 j + 1
        group = word[:, None] * 8 + tl.arange(0, 8)[None, :]
        a0, l0 = _token(a0, l0, first, second, select, x, one, tokens, group, groups, DTYPE, INTERPRETED)
        if TOKENS > 1:
            a1, l1 = _token(a1, l1, first, second, select, x, one + 1, tokens, group, groups, DTYPE, INTERPRETED)
        if TOKENS > 2:
            a2, l2 = _token(a2, l2, first, second, select, x, one + 2, tokens, group, groups, DTYPE, INTERPRETED)
            a3, l3 = _token(a3, l3, first, second, select, x, one + 3, tokens, group, groups, DTYPE, INTERPRETED)
    _reduce_and_write(a0, l0, partial, bias, other, y, one, row, tokens, rows, BIAS, ACTIVATION, COMBINE, PARTIAL)
    if TOKENS > 1:
        _reduce_and_write(
            a1, l1, partial, bias, other, y, one + 1, row, tokens, rows, BIAS, ACTIVATION, COMBINE, PARTIAL
        )
    if TOKENS > 2:
        _reduce_and_write(
            a2, l2, partial, bias, other, y, one + 2, row, tokens, rows, BIAS, ACTIVATION, COMBINE, PARTIAL
        )
        _reduce_and_write(
            a3, l3, partial, bias, other, y, one + 3, row, tokens, rows, BIAS, ACTIVATION, COMBINE, PARTIAL
        )


@triton.jit
def _reduce_and_write(
    acc, lost, partial, bias, other, y, token, row, tokens, rows,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Add up the sums (rows, words, 8) of one token and write them."""
    total = tl.sum(tl.sum(acc, 2), 1) + tl.sum(tl.sum(lost, 1), 0)
    token = token + tl.arange(0, 1)
    _written(total[:, None], partial, bias, other, y, token, row, tokens, rows, BIAS, ACTIVATION, COMBINE, PARTIAL)


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
