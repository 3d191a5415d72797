"""Attention in plain torch: what every row of the table has to compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twofour.kernels.quantization import TINY
from twofour.shapes import Bool, Float, Shaped


def reference(
    q: Float[Tensor, "batch heads queries width"],
    k: Float[Tensor, "batch groups keys width"],
    v: Float[Tensor, "batch groups keys out"],
    mask: Shaped[Tensor, "*mask"] | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    unseen: float = 0.0,
    dropout: float = 0.0,
    seed: int = 0,
) -> Float[Tensor, "batch heads queries out"]:
    """Return softmax(scale q k^T + mask) v; arguments as in `attention`, any floating dtype.

    Args:
        q: As in `attention`.
        k: As in `attention`.
        v: As in `attention`.
        mask: As in `attention`.
        scale: As in `attention`.
        causal: As in `attention`.
        unseen: As in `attention`.
        dropout: The share of weights that are zero, to the nearest 65536th; the others are divided by what is left.
        seed: From which it follows which ones (`kept_by_dropout`).
    """
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1), -torch.inf
        )
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    weights = scores.softmax(-1)
    weights = weights.masked_fill(scores.isneginf().all(-1, keepdim=True), unseen)
    if below := drop_below(dropout):
        weights = weights * kept_by_dropout(weights.shape, below, seed).to(weights) * (65536 / (65536 - below))
    return weights @ v


def drop_below(share: float) -> int:
    """Return below which of 65536 numbers a weight is dropped, for a share of them."""
    return min(65535, round(65536 * share))


def kept_by_dropout(shape: Sequence[int], below: int, seed: int) -> Bool[Tensor, "batch heads queries keys"]:
    """Return which weights stay: those whose 16 bits are not `below`.

    Keys 2i and 2i + 1 of a row share 32 bits, the lower half is the first one's: MurmurHash3's finaliser of i and of
    the row's seed, which is that of the row's number, of 64 bits, and of `seed`.
    """
    batch, heads, queries, keys = shape
    rows = torch.arange(batch * heads * queries, device="cpu")
    seeds = _finalised(rows & 0xFFFFFFFF, _finalised(rows >> 32, torch.tensor(seed, dtype=torch.int64, device="cpu")))
    key = torch.arange(keys, device="cpu")
    bits = _finalised(key >> 1, seeds[:, None]) >> ((key & 1) << 4) & 0xFFFF
    return (bits >= below).view(shape)


def _finalised(counter: Tensor, seed: Tensor) -> Tensor:
    """Return 32 bits of a counter, in int64, whose products wrap around as those of 32 bits do."""
    x = counter * 0x9E3779B1 + seed & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


STEPS, LAST = 2048, 32767
"""Steps of a weight's exponent from one power of two to the next, and the last one, whose weight is 0."""

ONE, SLOPE, BEND = 255 << 8, 43896, 11328
"""2^-x is (ONE - x (SLOPE - x BEND)) / ONE, 0 <= x < 1: a parabola, 1 at 0, with the least relative error, 2.3e-3."""

MOST_OFF = 32
"""256ths that the weights of a query may be off in bytes for each unit of their sum: of more each has two bytes."""

MOST_NOISE = 0.5
"""Standard deviation of what rounding adds to the scores of a query at most; of more it is computed in floats."""

HIDDEN = -1e3
"""What is added to the scores of a key that is hidden from all queries."""


def whole_reference(
    q: Float[Tensor, "batch heads queries width"],
    k: Float[Tensor, "batch groups keys width"],
    v: Float[Tensor, "batch groups keys out"],
    mask: Shaped[Tensor, "*mask"] | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    unseen: float = 0.0,
) -> Float[Tensor, "batch heads queries out"]:
    """Return attention as rows of int8 compute it, bit for bit, before the answer is rounded to bfloat16 or to bytes.

    All real arithmetic is float32. A query becomes whole numbers of at most 127 by its greatest magnitude. Keys have
    the middle of each column taken off, which changes no softmax, and one step for the head; values a middle and a step
    for each column. Ranges are those of the keys that a mask which is one for all queries and heads (broadcast along
    both) leaves. A score is an exact sum of products; a weight is 255 2^-t rounded, t how far its score is below the
    row's largest in units of ln 2, in 2048ths. Where that takes off and adds more than an eighth of a row's weights in
    all, each of them is written in two bytes, 255 256 2^-t rounded down. The weighted values are an exact sum again,
    divided by the sum of the weights. A number that is not finite makes NaN of its query's answers; of the head's, in a
    key; of the column's, in a value. A query whose steps are so coarse that rounding adds more than `MOST_NOISE` to its
    scores is computed in floats (here as `reference` does: that alone is not bit for bit).

    Args:
        q: bfloat16, or float32 of such values.
        k: Likewise.
        v: Likewise.
        mask: As in `attention`.
        scale: As in `attention`.
        causal: As in `attention`.
        unseen: As in `attention`.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), *(t.float().repeat_interleave(group, dim=1) for t in (k, v))
    seen = _seen_by_any(mask, q.shape[0], k.shape[2])
    scores, units = _scores(q, k, seen, q.shape[-1] ** -0.5 if scale is None else scale)
    middles, halves = _spread(v, seen)
    each = _step(halves)
    values = ((v - middles) * (1 / each)).round().nan_to_num(0)
    answer = _weighed(scores, units, (values, each, middles), mask, causal, unseen)
    coarse = is_coarse(units, q.shape[-1])
    if not coarse.any():
        return answer
    return torch.where(coarse, reference(q, k, v, mask, scale=scale, causal=causal, unseen=unseen), answer)


def bytes_reference(
    q: Shaped[Tensor, "batch heads queries width"],
    k: Shaped[Tensor, "batch groups keys width"],
    v: Shaped[Tensor, "batch groups keys out"],
    units: Float[Tensor, " heads"],
    each: Float[Tensor, "groups out"],
    middles: Float[Tensor, "groups out"],
    mask: Shaped[Tensor, "*mask"] | None = None,
    *,
    causal: bool = False,
    unseen: float = 0.0,
) -> Float[Tensor, "batch heads queries out"]:
    """Return what rows of int8 make of operands that are bytes, bit for bit, before the answer is rounded.

    All is as in `whole_reference` but for the ranges, which come of data.

    Args:
        q: uint8 that stands for q - 128.
        k: Likewise.
        v: Likewise, for (v - 128) * each + middles.
        units: What one of the products of whole numbers is in units of ln 2.
        each: Steps of the values' columns.
        middles: What their 128 stands for.
        mask: As in `attention`.
        causal: As in `attention`.
        unseen: As in `attention`.
    """
    group = q.shape[1] // k.shape[1]
    k, v, each, middles = (
        t.repeat_interleave(group, dim=axis) for t, axis in ((k, 1), (v, 1), (each, 0), (middles, 0))
    )
    scores = ((q.double() - 128) @ (k.double() - 128).mT).float()
    values = v.double() - 128, each[:, None], middles[:, None]
    return _weighed(scores, units[:, None, None].expand(*scores.shape[:3], 1), values, mask, causal, unseen)


def _weighed(
    scores: Tensor,
    units: Tensor,
    values: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    causal: bool,
    unseen: float,
) -> Tensor:
    """Return the answers for whole scores, what one of their units is, whole values with their steps and middles."""
    factor = (units * STEPS).clamp(max=torch.finfo(torch.float32).max)
    if mask is not None and mask.dtype is not torch.bool:
        scores, factor = _added(scores * units, mask), units.new_tensor(STEPS)
    elif mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1), -torch.inf
        )
    largest = scores.amax(-1, keepdim=True)
    steps = ((largest - scores) * factor).nan_to_num(LAST, LAST).clamp(max=LAST).round().long()
    whole, rest = steps >> 11, (steps & 2047) << 5
    upper, lower = _weights((ONE - (rest * (SLOPE - (rest * BEND >> 16)) >> 16)) >> whole)
    rows, each, middles = values
    high, low = upper.double(), lower.double()
    sums = 256 * (high @ rows.double()).float() + (low @ rows.double()).float()
    total = 256 * high.sum(-1, keepdim=True).float() + low.sum(-1, keepdim=True).float()
    answer = (sums * (1 / total) * each + middles).masked_fill(largest.isneginf(), unseen)
    return answer.masked_fill(~(units - units == 0), torch.nan)


def is_coarse(units: Tensor, width: int) -> Tensor:
    """Tell of which queries scores are too coarse: at most 127 sqrt(width / 6) units are what rounding adds to one."""
    least = MOST_NOISE * _LOG2_E / (127 * (torch.tensor(width, dtype=torch.float32, device="cpu") / 6).sqrt())
    return (units > least) & units.isfinite()


def _weights(fine: Tensor) -> tuple[Tensor, Tensor]:
    """Return upper and lower bytes of weights in 256ths, the lower ones 0 in rows of which bytes alone are enough."""
    nearest = (fine + 128) >> 8
    off = (fine - (nearest << 8)).abs().sum(-1, keepdim=True)
    two = off > MOST_OFF * nearest.sum(-1, keepdim=True)
    return torch.where(two, fine >> 8, nearest), torch.where(two, fine & 255, 0)


def _scores(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return sums of products of whole numbers, and what one of each query's is in units of ln 2."""
    centres, halves = _spread(k, seen)
    step = _step(halves.nan_to_num(0).amax(-1, keepdim=True)) + (0 * centres).sum(-1, keepdim=True)
    keys = ((k - centres) * (1 / step)).round().clamp(-128, 127)
    by = torch.tensor(scale, dtype=torch.float32, device="cpu") * _LOG2_E
    own = _step(q.abs().nan_to_num(0, 0).amax(-1, keepdim=True))
    queries = (q * (torch.where(by < 0, -1.0, 1.0) * (1 / own))).round().clamp(-128, 127)
    sums = (queries.nan_to_num(0).double() @ keys.nan_to_num(0).double().mT).float()
    return sums, own * step * by.abs() + (0 * q).sum(-1, keepdim=True)


def _added(scores: Tensor, mask: Tensor) -> Tensor:
    """Return scores in units of ln 2 and a mask, rounded once; infinities stay, finite sums stay finite."""
    sums = torch.where(mask.isfinite(), mask.double() * _LOG2_E.double() + scores.double(), mask.double())
    return sums.clamp(min=-torch.finfo(torch.float32).max).float().masked_fill(mask.isneginf(), -torch.inf)


_LOG2_E = torch.tensor(1.44269504, dtype=torch.float32, device="cpu")


def _seen_by_any(mask: Tensor | None, batch: int, keys: int) -> Tensor:
    """Return which keys (batch, 1, keys, 1) count in ranges."""
    every = torch.ones(batch, 1, keys, 1, dtype=torch.bool, device="cpu")
    if mask is None or any(size != 1 for size in mask.shape[-3:-1]):
        return every
    seen = mask if mask.dtype is torch.bool else ~(mask <= HIDDEN)
    seen = seen.reshape(-1, 1, mask.shape[-1], 1).expand(batch, 1, keys, 1)
    return torch.where(seen.any(2, keepdim=True), seen, every)


def _spread(rows: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the middle of each column (.., 1, columns) over the rows that are seen, NaN of one that is not finite."""
    low, high = (rows.masked_fill(~seen, end) for end in (torch.inf, -torch.inf))
    above, below = high.amax(2, keepdim=True) * 0.5, low.amin(2, keepdim=True) * 0.5
    broken = (rows * 0).masked_fill(~seen, 0).sum(2, keepdim=True)
    return above + below + broken, above - below


def _step(most: Tensor) -> Tensor:
    """Return the step of whole numbers up to 127 for this greatest magnitude."""
    return (most * torch.tensor(1 / 127, dtype=torch.float32, device="cpu")).clamp(min=TINY)
