# type: ignore
# The line above: a checker of types takes the kernels for Python, and Triton need not be installed.
"""The Triton kernels of planes: inputs are rounded and cut into planes, then bits that two planes share are counted.

See `planes.py`. The ones of a word are one instruction on a GPU, popc. Triton's interpreter has no device functions: it
adds neighbouring bits in its place.

Where numbers wrap around modulo 2^32, `sanitize_overflow=False` keeps Triton's debug mode from refusing them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda.libdevice import popc

from twofour.kernels.epilogue_triton import stored
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import TINY, Quantization
from twofour.native import gpu

_AT_ONCE = 32
"""Words of inputs that are rounded at once, and most that are multiplied."""

_SUMS = 4096
"""Sums that a program holds, 32 for each of its threads: a tile for each of the words that it multiplies at once."""

_EXACT = {"enable_fp_fusion": False, "num_warps": 4}
"""One rounding an operation: fused multiply-adds would give other bits than the reference."""


@triton.jit
def _whole(x):
    """Round to nearest even, of magnitudes below 2^22."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2^23


@triton.jit
def _range(low, high, MOST: tl.constexpr, FIXED: tl.constexpr, ABOVE: tl.constexpr, LEAST: tl.constexpr):
    """Return scale and zero point of the numbers from `low`, at most 0, to `high`, at least 0: `spread_over`."""
    least = tl.full((), LEAST, tl.float32)
    if FIXED:
        scale = tl.maximum(tl.div_rn(tl.maximum(-low, high), tl.full((), ABOVE, tl.float32)), least)
        return scale, tl.full((), FIXED, tl.float32)
    scale = tl.maximum(tl.div_rn(high - low, tl.full((), MOST, tl.float32)), least)
    return scale, _whole(tl.div_rn(-low, scale))


@triton.jit
def _codes(x, scale, zero, MOST: tl.constexpr, BIPOLAR: tl.constexpr):
    """Return numbers as codes, int32: `quantize_input`."""
    if BIPOLAR:
        scaled = x * tl.div_rn(tl.full((), 0.5, tl.float32), scale) + (MOST + 1) // 2
        scaled = tl.where(scaled == scaled, scaled, 0.0)
        return tl.minimum(tl.maximum(scaled, 0.0), MOST).to(tl.int32)
    scaled = x * tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    scaled = tl.where(scaled == scaled, scaled, -zero)
    return (_whole(tl.minimum(tl.maximum(scaled, -zero), MOST - zero)) + zero).to(tl.int32)


@triton.jit
def planes_of_inputs(
    x, planes, sums, scales, zeros, given_scale, tokens, columns, words,
    DYNAMIC: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, FIXED: tl.constexpr, ABOVE: tl.constexpr,
    BIPOLAR: tl.constexpr, LEAST: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Round one token to codes and write their planes, their sum, and what they stand for.

    Args:
        x: (tokens, columns), floats.
        planes: int32 (BITS, tokens, words), written.
        sums: int32 (tokens,), of the codes, written.
        scales: float32 (tokens,), written; NaN where the token is lost.
        zeros: int32 (tokens,), written.
        given_scale: float32 of a range for all tokens.
        tokens: Rows of x.
        columns: Inputs.
        words: Words of a plane of a token.
        DYNAMIC: Whether the token has a range of its own.
        BITS: Of a code.
        ZERO: Zero point of a range for all tokens.
        FIXED: Zero point of levels around zero, or 0: it is found.
        ABOVE: Steps from zero to the greatest of such levels.
        BIPOLAR: Whether the levels are the odd numbers.
        LEAST: The least scale.
        WORDS: Words that are written at once.
        STEPS: How often.
    """
    token = tl.program_id(0).to(tl.int64)
    MOST: tl.constexpr = (1 << BITS) - 1
    place = tl.arange(0, 32 * WORDS)
    low, high = tl.zeros((32 * WORDS,), tl.float32), tl.zeros((32 * WORDS,), tl.float32)
    lost = tl.zeros((32 * WORDS,), tl.int32)
    for step in range(STEPS):
        column = step * 32 * WORDS + place
        number = tl.load(x + token * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        broken = number != number
        if DYNAMIC:
            broken = broken | (tl.abs(number) == float("inf"))
        lost = tl.where(broken, 1, lost)
        low, high = tl.minimum(low, number), tl.maximum(high, number)
    scale, zero = given_scale, tl.full((), ZERO, tl.float32)
    if DYNAMIC:
        scale, zero = _range(tl.min(low, 0), tl.max(high, 0), MOST, FIXED, ABOVE, LEAST)
    broken = tl.max(lost, 0)
    # The codes of a lost token are of no consequence, but must be finite: the range of one is taken.
    scale, zero = tl.where(broken == 0, scale, 1.0), tl.where(broken == 0, zero, 0.0)
    total = tl.zeros((32 * WORDS,), tl.int32)
    bit = tl.arange(0, 32)[None, :].to(tl.uint32)
    for step in range(STEPS):
        column = step * 32 * WORDS + place
        number = tl.load(x + token * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        code = tl.where(column < columns, _codes(number, scale, zero, MOST, BIPOLAR), 0)
        total += code
        of_words = tl.reshape(code, (WORDS, 32)).to(tl.uint32)
        word = step * WORDS + tl.arange(0, WORDS)
        for plane in tl.static_range(BITS):
            ones = tl.sum(((of_words >> plane) & 1) << bit, 1).to(tl.int32, bitcast=True)
            tl.store(planes + (plane * tokens + token) * words + word, ones, mask=word < words)
    tl.store(sums + token, tl.sum(total, 0))
    tl.store(scales + token, tl.where(broken == 0, scale, float("nan")))
    tl.store(zeros + token, zero.to(tl.int32))


@triton.jit
def product_of_planes(
    inputs, sums, scales, zeros, weight, row_scales, row_sums, levels, bias, other, y, tokens, rows, words,
    X_BITS: tl.constexpr, W_BITS: tl.constexpr, FACTOR: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Multiply a block of outputs by a block of tokens.

    Args:
        inputs: int32 (X_BITS, tokens, words), planes.
        sums: int32 (tokens,), of the codes.
        scales: float32 (tokens,).
        zeros: int32 (tokens,): an input is scale * (FACTOR * code - zero).
        weight: int32 (W_BITS, words, rows), planes.
        row_scales: float32 (rows,).
        row_sums: int32 (rows,), of the values.
        levels: int32 alpha and beta: a value is alpha * code + beta.
        bias: float32 (rows,), with BIAS.
        other: (tokens, rows), with COMBINE.
        y: (tokens, rows).
        tokens: Of the inputs.
        rows: Outputs.
        words: Words of a plane of a row.
        X_BITS: Bits of an input.
        W_BITS: Bits of a weight.
        FACTOR: From one level of an input to the next.
        BIAS: Whether there is a bias.
        ACTIVATION: Of the epilogue.
        COMBINE: Of the epilogue.
        TOKENS: Tokens of a block.
        ROWS: Outputs of a block.
        WORDS: Words that are multiplied at once, each in sums of its own.
        STEPS: How often.
        INTERPRETED: Whether Triton's interpreter runs it.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[None, :]
    found = tl.zeros((WORDS, TOKENS, ROWS), tl.int32)
    for step in range(STEPS):
        word = step * WORDS + tl.arange(0, WORDS)[:, None]
        of_x, of_w = (word < words) & (token < tokens), (word < words) & (row < rows)
        for s in range(X_BITS):  # a loop: unrolled, all of its loads would be held in registers at once
            at_x = (s * tokens + token).to(tl.int64) * words + word
            u = tl.load(inputs + at_x, mask=of_x, other=0)[:, :, None]
            for t in range(W_BITS):  # read again for each plane of the inputs, from the first-level cache
                at_w = (t * words + word).to(tl.int64) * rows + row
                w = tl.load(weight + at_w, mask=of_w, other=0)[:, None, :]
                if INTERPRETED:
                    ones = (u & w).to(tl.uint32, bitcast=True)
                    ones -= (ones >> 1) & 0x55555555
                    ones = (ones & 0x33333333) + ((ones >> 2) & 0x33333333)
                    ones = tl.mul((ones + (ones >> 4)) & 0x0F0F0F0F, 0x01010101, sanitize_overflow=False) >> 24
                    ones = ones.to(tl.int32)
                else:
                    ones = popc(u & w)
                found = tl.add(found, ones << (s + t), sanitize_overflow=False)
    total = tl.sum(found, 0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    alpha, beta = tl.load(levels), tl.load(levels + 1)
    of_codes = tl.load(sums + token, mask=token < tokens, other=0)
    zero = tl.load(zeros + token, mask=token < tokens, other=0)
    of_values = tl.load(row_sums + row, mask=row < rows, other=0)
    of_both = tl.mul(alpha, total, sanitize_overflow=False)
    of_both = tl.add(of_both, tl.mul(beta, of_codes, sanitize_overflow=False), sanitize_overflow=False)
    whole = tl.mul(FACTOR, of_both, sanitize_overflow=False)
    whole = tl.sub(whole, tl.mul(zero, of_values, sanitize_overflow=False), sanitize_overflow=False)
    scale = tl.load(scales + token, mask=token < tokens, other=0.0)
    scale = scale * tl.load(row_scales + row, mask=row < rows, other=0.0)
    stored(whole.to(tl.float32) * scale, bias, other, y, token, row, tokens, rows, BIAS, ACTIVATION, COMBINE)


def _planes_of(x: Tensor, words: int, quantization: Quantization) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the planes of inputs, and sums of codes, scales and zero points of tokens."""
    tokens, bits = len(x), quantization.bits
    planes = x.new_empty((bits, tokens, words), dtype=torch.int32)
    sums, zeros = (x.new_empty(tokens, dtype=torch.int32) for _ in range(2))
    scales = x.new_empty(tokens, dtype=torch.float32)
    bipolar, at_once = quantization.levels == "bipolar", min(_AT_ONCE, triton.next_power_of_2(words))
    planes_of_inputs[(tokens,)](
        *(x, planes, sums, scales, zeros, quantization.codes[1], tokens, x.shape[1], words),
        DYNAMIC=quantization.dynamic,
        BITS=bits,
        ZERO=quantization.zero,
        FIXED=0 if quantization.levels == "unsigned" else quantization.zero,
        ABOVE=quantization.most if bipolar else max(quantization.most - quantization.zero, 1),
        BIPOLAR=bipolar,
        LEAST=TINY,
        WORDS=at_once,
        STEPS=triton.cdiv(words, at_once),
        **_EXACT,
    )
    return planes, sums, scales, zeros


def launch(
    x: Tensor,
    weight: Tensor,
    beside: tuple[Tensor, ...],
    bias: Tensor | None,
    other: Tensor | None,
    y: Tensor,
    problem: Problem,
    tile: tuple[int, int],
) -> None:
    """Fill y (tokens, out) with epilogue(x @ W.T + bias).

    Args:
        x: Floats (tokens, in), contiguous.
        weight: int32 (bits, words, out).
        beside: float32 scales and int32 sums of values (out,), int32 alpha and beta.
        bias: float32 (out,) or None.
        other: Second operand of the epilogue, (tokens, out), contiguous, or None.
        y: (tokens, out), contiguous.
        problem: What is computed.
        tile: Tokens and outputs of a program.
    """
    quantization, (tokens, rows), words = problem.quantization, y.shape, weight.shape[1]
    inputs = _planes_of(x, words, quantization)
    at_once = min(_AT_ONCE, _SUMS // (tile[0] * tile[1]), triton.next_power_of_2(words))
    has_bias, bias, other = bias is not None, y if bias is None else bias, y if other is None else other
    product_of_planes[(triton.cdiv(rows, tile[1]), triton.cdiv(tokens, tile[0]))](
        *(*inputs, weight, *beside, bias, other, y, tokens, rows, words),
        X_BITS=quantization.bits,
        W_BITS=weight.shape[0],
        FACTOR=quantization.factor,
        BIAS=has_bias,
        ACTIVATION=problem.epilogue.activation,
        COMBINE=problem.epilogue.combine,
        TOKENS=tile[0],
        ROWS=tile[1],
        WORDS=at_once,
        STEPS=triton.cdiv(words, at_once),
        INTERPRETED=gpu.interpreted(),
        **_EXACT,
    )
