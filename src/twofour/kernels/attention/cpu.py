"""Fused attention on the CPU, float32, bfloat16 or int8: rows of attention.inc, called on strided tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.attention.operands import (
    DTYPES,
    added_rows,
    mask_of,
    one_for_all,
    require_windows,
    sizes_of,
)
from twofour.kernels.registration import register
from twofour.native.surroundings import by_operators, followed, plain

MOST_KEYS = 1 << 16
"""Keys up to which attention in int8 has exact sums; of more, operands of bfloat16 are multiplied as they are."""

MOST_WIDTH = 1 << 16
"""Columns of a head up to which that holds of its scores."""

MOST_BYTE_KEYS = 1 << 11
"""Keys up to which two bytes of each weight are off by a 32nd of a query's weights at most, whatever its scores."""

_SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask=None, float? scale=None, bool causal=False, "
    "Tensor? k_added=None, Tensor? v_added=None, float unseen=0.0, float bytes_scale=0.0, int bytes_zero=0) -> Tensor"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    k_added: Tensor | None = None,
    v_added: Tensor | None = None,
    unseen: float = 0.0,
    bytes_scale: float = 0.0,
    bytes_zero: int = 0,
) -> Tensor:
    """Return softmax(scale q k^T + mask) v, as `torch.nn.functional.scaled_dot_product_attention` does.

    Args:
        q: float32 or bfloat16 (batch, heads, queries, width), any strides but a contiguous last axis.
        k: (batch, key heads, keys, width) of q's dtype; heads is a multiple of key heads.
        v: (batch, key heads, keys, value width) of q's dtype.
        mask: Broadcasts to (batch, heads, queries, keys): bool (False hides) or float32 (added); None hides nothing.
        scale: Factor of the scores; default width ** -0.5.
        causal: Key j is hidden from query i where j > i.
        k_added: Keys behind those of `k`, (batch, key heads, more keys, width) of its dtype: the answer is that of both
            concatenated, and a cache is not copied to add a token. With `v_added` or not at all.
        v_added: Values behind those of `v`, (batch, key heads, more keys, value width).
        unseen: What a query that sees no key answers: 0 as torch's attention, or NaN as a softmax that is written out.
        bytes_scale: Of an answer in bytes, round(answer / bytes_scale) + bytes_zero within 0 ... 255, a NaN being 0:
            what an int8 product of that static range reads. 0.0 for an answer of q's dtype.
        bytes_zero: 0 ... 255, the byte that stands for 0.

    Returns:
        (batch, heads, queries, value width) of q's dtype or uint8, in the order of (batch, queries, heads, value
        width), so that joining the heads copies nothing.

    Raises:
        KernelError: The operands do not fit.
    """
    if by_operators():
        with followed():
            whole = bytes_scale, bytes_zero
            return torch.ops.twofour.attention(q, k, v, mask, scale, causal, k_added, v_added, unseen, *whole)
    q, k, v, mask, k_added, v_added = plain("attention", q, k, v, mask, k_added, v_added)
    return _attention(q, k, v, mask, scale, causal, k_added, v_added, unseen, bytes_scale, bytes_zero)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    k_added: Tensor | None = None,
    v_added: Tensor | None = None,
    unseen: float = 0.0,
    bytes_scale: float = 0.0,
    bytes_zero: int = 0,
    int8: bool | tuple[int, int] = False,
) -> Tensor:
    batch, heads, queries, keys, width, value_width = sizes_of(q, k, v)
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    if k_added is not None or v_added is not None:
        k_added, v_added = added_rows(k, v, k_added, v_added)
        keys += k_added.shape[2]
    dtype = torch.uint8 if bytes_scale else q.dtype
    out = torch.empty(batch, queries, heads, value_width, dtype=dtype, device="cpu").transpose(1, 2)
    native.extension().attention(
        _row(q, keys, width, int8, mask, causal),
        *(q, k, v, out),
        None if mask is None else mask_of(mask, (batch, heads, queries, keys)),
        k_added,
        v_added,
        width**-0.5 if scale is None else scale,
        causal,
        unseen,
        bytes_scale,
        bytes_zero,
        native.threads(),
    )
    return out


def attention_of_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins: tuple[int, int, int],
    sizes: tuple[int, int, int],
    width: int,
    mask: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    unseen: float = 0.0,
    bytes_scale: float = 0.0,
    bytes_zero: int = 0,
    int8: bool | tuple[int, int] = False,
    steps: Tensor | None = None,
) -> Tensor:
    """Return attention between columns of products, its heads side by side: what views around `attention` would give.

    Args:
        q: (batch, queries, columns), float32 or bfloat16.
        k: (batch, keys, columns) of q's dtype; it may be the same tensor.
        v: (batch, keys, columns) of q's dtype.
        begins: The first columns of queries, keys and values.
        sizes: Their numbers of columns: heads (or key heads) times `width`.
        width: Columns of one head.
        mask: As in `attention`.
        scale: As in `attention`.
        causal: As in `attention`.
        unseen: As in `attention`.
        bytes_scale: As in `attention`.
        bytes_zero: As in `attention`.
        int8: Compute in whole numbers what is given and answered in bfloat16: `whole_reference` says how. Two numbers
            are the least and the most keys for which that was judged: calls of fewer or more, causal ones and those of
            a mask that differs between queries or heads then run as without it. Up to three queries, more than
            `MOST_KEYS` keys and heads of more than `MOST_WIDTH` columns are computed in floats all the same.
        steps: float32 (heads + 2 * value columns,), where q, k and v are uint8 by ranges of data, 128 standing for 0:
            what a unit of the scores of each head is in units of ln 2, then the step of each column of the values,
            then what its 128 stands for (`bytes_reference`). `scale` and `int8` count for nothing then; with more than
            `MOST_BYTE_KEYS` keys numbers of bfloat16 are made of the bytes.

    Returns:
        (batch, queries, heads * width) of q's dtype or uint8, contiguous; bfloat16 or uint8 of bytes.

    Raises:
        KernelError: The operands do not fit.
    """
    if steps is not None:
        given = (q, k, v), steps, (begins, sizes, width), mask, None, (causal, unseen, bytes_scale, bytes_zero)
        return _of_bytes(*given, k.size(1))
    q, k, v = plain("attention", q, k, v)
    if not (q.dtype is k.dtype is v.dtype and q.dtype in DTYPES and q.stride(2) == k.stride(2) == v.stride(2) == 1):
        given = mask, scale, causal, None, None, unseen, bytes_scale, bytes_zero, int8
        return _of_parts((q, k, v), begins, sizes, width, *given)
    out = torch.empty(*q.shape[:2], sizes[0], dtype=torch.uint8 if bytes_scale else q.dtype, device="cpu")
    native.extension().attention_of_columns(
        _row(q, k.size(1), width, int8, mask, causal),
        *(q, k, v, out),
        None if mask is None else mask_of(mask, (q.size(0), sizes[0] // width, q.size(1), k.size(1))),
        begins,
        sizes,
        width,
        width**-0.5 if scale is None else scale,
        causal,
        unseen,
        bytes_scale,
        bytes_zero,
        native.threads(),
    )
    return out


def _of_parts(
    operands: tuple[Tensor, Tensor, Tensor],
    begins: tuple[int, int, int],
    sizes: tuple[int, int, int],
    width: int,
    *given: Any,
) -> Tensor:
    """Return attention of columns that are no plain rows of one type, by views."""
    parts = (t[..., begin : begin + size] for t, begin, size in zip(operands, begins, sizes, strict=True))
    q, k, v = (torch.unflatten(part, -1, (-1, width)).transpose(1, 2) for part in parts)
    return _attention(q, k, v, *given).transpose(1, 2).flatten(2)


def attention_of_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins: tuple[int, int, int],
    sizes: tuple[int, int, int],
    width: int,
    offsets: Tensor,
    scale: float | None = None,
    causal: bool = False,
    bytes_scale: float = 0.0,
    bytes_zero: int = 0,
    int8: bool | tuple[int, int] = False,
    steps: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Return `attention_of_columns` inside each of several sequences whose rows stand one behind the other.

    Args:
        q: (1, rows, columns), float32 or bfloat16, its columns contiguous.
        k: As `q`, of its dtype; it may be the same tensor.
        v: As `k`.
        begins: As in `attention_of_columns`.
        sizes: As in `attention_of_columns`.
        width: As in `attention_of_columns`.
        offsets: int64 (sequences + 1,): the row with which each sequence begins, and behind them the number of rows. A
            sequence may be empty.
        scale: As in `attention`.
        causal: As in `attention`, inside each sequence.
        bytes_scale: As in `attention`.
        bytes_zero: As in `attention`.
        int8: As in `attention_of_columns`; keys are counted as `places` has them, else as rows of all sequences.
        steps: As in `attention_of_columns`.
        places: (sequences, length), of which the size alone counts: no sequence that is read is longer than `length`.

    Returns:
        (1, rows, heads * width) of q's dtype or uint8, contiguous; bfloat16 or uint8 of bytes.

    Raises:
        KernelError: The operands do not fit.
    """
    if steps is not None:
        given = (q, k, v), steps, (begins, sizes, width), None, offsets, (causal, 0.0, bytes_scale, bytes_zero)
        return _of_bytes(*given, q.size(1) if places is None else places.size(1))
    q, k, v, offsets = plain("attention", q, k, v, offsets)
    if q.ndim != 3 or not q.dtype is k.dtype is v.dtype or q.dtype not in DTYPES:
        raise KernelError(
            "the operands of attention in sequences do not fit",
            got=", ".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in (("q", q), ("k", k), ("v", v))),
            wanted="float32 or bfloat16 (1, rows, columns) alike",
        )
    out = torch.empty(*q.shape[:2], sizes[0], dtype=torch.uint8 if bytes_scale else q.dtype, device="cpu")
    native.extension().attention_of_sequences(
        _row(q, q.size(1) if places is None else places.size(1), width, int8, None, causal),
        *(q, k, v, out, offsets),
        begins,
        sizes,
        width,
        width**-0.5 if scale is None else scale,
        causal,
        bytes_scale,
        bytes_zero,
        native.threads(),
    )
    return out


def _of_bytes(
    operands: tuple[Tensor, Tensor, Tensor],
    steps: Tensor,
    columns: tuple[tuple[int, int, int], tuple[int, int, int], int],
    mask: Tensor | None,
    offsets: Tensor | None,
    options: tuple[bool, float, float, int],
    keys: int,
) -> Tensor:
    """Return attention of columns of bytes, of sequences where there are offsets."""
    q, k, v = plain("attention", *operands)
    (_, sizes, width), (causal, unseen, scale, zero) = columns, options
    if keys > MOST_BYTE_KEYS or width > MOST_WIDTH:
        q, k, v = opened_bytes((q, k, v), steps, *columns)
        parts = (0, 0, 0), sizes, width
        if offsets is None:
            return attention_of_columns(q, k, v, *parts, mask, 1.0, causal, unseen, scale, zero)
        return attention_of_sequences(q, k, v, *parts, offsets, 1.0, causal, scale, zero)
    out = torch.empty(*q.shape[:2], sizes[0], dtype=torch.uint8 if scale else torch.bfloat16, device="cpu")
    native.extension().attention_of_bytes(
        native.best("attention", dtype="int8").index,
        *(q, k, v, out, steps),
        None if mask is None else mask_of(mask, (q.size(0), sizes[0] // width, q.size(1), k.size(1))),
        offsets,
        *columns,
        causal,
        unseen,
        scale,
        zero,
        native.threads(),
    )
    return out


def opened_bytes(
    operands: tuple[Tensor, Tensor, Tensor],
    steps: Tensor,
    begins: tuple[int, int, int],
    sizes: tuple[int, int, int],
    width: int,
) -> list[Tensor]:
    """Return the columns of bytes as bfloat16: what they stand for, the factors of scores being those of queries."""
    q, k, v = (t[..., b : b + size].float() - 128 for t, b, size in zip(operands, begins, sizes, strict=True))
    units, each, middles = torch.split(steps, [sizes[0] // width, sizes[2], sizes[2]])
    q = (torch.unflatten(q, -1, (-1, width)) * (units * math.log(2))[:, None]).flatten(-2)
    return [t.bfloat16() for t in (q, k, v * each + middles)]


def attention_of_windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    width: int,
    mask: Tensor | None = None,
    scale: float | None = None,
    unseen: float = 0.0,
) -> Tensor:
    """Return attention among the rows of each window of an image, read and written at their own places.

    Args:
        q: (images, rows, heads * width), float32 or bfloat16.
        k: (images, rows, key heads * width) of q's dtype.
        v: (images, rows, key heads * width) of q's dtype.
        order: int64 (windows, rows of one): which rows of an image each window has, every row once.
        width: Columns of one head.
        mask: As in `attention`; broadcasts to (windows, heads, rows of a window, rows of a window), for each image.
        scale: As in `attention`.
        unseen: As in `attention`.

    Returns:
        (images, rows, heads * width) of q's dtype, contiguous.

    Raises:
        KernelError: The operands do not fit.
    """
    require_windows(q, k, v, order, width)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in plain("attention", q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device="cpu")
    windows, rows = order.shape
    native.extension().attention_of_windows(
        native.best("attention", dtype=DTYPES[q.dtype]).index,
        *(q, k, v, out),
        None if mask is None else mask_of(mask, (windows, q.shape[-1] // width, rows, rows)),
        order,
        width,
        width**-0.5 if scale is None else scale,
        unseen,
        native.threads(),
    )
    return out


def _row(q: Tensor, keys: int, width: int, int8: bool | tuple[int, int], mask: Tensor | None, causal: bool) -> int:
    """Return the index of the row that serves queries: of int8 where that is asked for."""
    if int8 and q.dtype is not torch.bfloat16:
        raise KernelError(
            "attention in int8 reads bfloat16",
            got=f"queries of {q.dtype}",
            wanted="torch.bfloat16",
            remedy="convert q, k and v by .bfloat16(), or leave `int8` out",
        )
    whole = bool(int8) and keys <= MOST_KEYS and width <= MOST_WIDTH
    if isinstance(int8, tuple):
        whole = whole and int8[0] <= keys <= int8[1] and not causal and one_for_all(mask)
    return native.best("attention", dtype="int8" if whole else DTYPES[q.dtype]).index


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    k_added: Tensor | None = None,
    v_added: Tensor | None = None,
    unseen: float = 0.0,
    bytes_scale: float = 0.0,
    bytes_zero: int = 0,
) -> Tensor:
    dtype = torch.uint8 if bytes_scale else q.dtype
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=dtype).transpose(1, 2)


register(_SCHEMA, _fake, CPU=_attention)
