"""Attention of a training step on the CPU: its answer where weights are dropped, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twofour import native
from twofour.kernels.attention.cpu import DTYPES, mask_of
from twofour.kernels.attention.reference import drop_below


def attention_dropped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
    dropout: float,
    seed: int,
) -> Tensor:
    """Return attention of which a share of the weights is zero and the others larger, as `reference` says.

    Args:
        q: As in `attention`.
        k: As in `attention`.
        v: As in `attention`.
        mask: As in `attention`.
        scale: As in `attention`.
        causal: As in `attention`.
        dropout: The share, at least 0 and below 1, to the nearest 65536th.
        seed: 32 bits from which it follows which weights go.

    Returns:
        As `attention`; a query that sees no key answers 0.

    Raises:
        KernelError: The operands do not fit.
    """
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    batch, heads, queries, width = q.shape
    out = torch.empty(batch, queries, heads, v.shape[3], dtype=q.dtype, device="cpu").transpose(1, 2)
    native.extension().attention_dropped(
        native.best("attention", dtype=DTYPES[q.dtype]).index,
        *(q, k, v, out),
        None if mask is None else mask_of(mask, (batch, heads, queries, k.shape[2])),
        width**-0.5 if scale is None else scale,
        causal,
        drop_below(dropout),
        seed,
        native.threads(),
    )
    return out


def attention_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    upstream: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of attention with these arguments; scores are computed anew.

    Args:
        q: float32 or bfloat16 (batch, heads, queries, width) on the CPU.
        k: (batch, key heads, keys, width) of q's dtype; heads is a multiple of key heads. Where it is larger, keys and
            values are copied for each head that shares them.
        v: (batch, key heads, keys, value width) of q's dtype.
        upstream: The answer's gradient, (batch, heads, queries, value width) of q's dtype, any strides.
        mask: As in `attention`; it gets no gradient.
        scale: As in `attention`.
        causal: As in `attention`.
        dropout: As in `attention_dropped`.
        seed: As in `attention_dropped`.

    Returns:
        Of the shapes and dtype of q, k and v. Where these are slices of one tensor, as a joined product leaves them,
        the gradients are the same slices of another one; elsewhere each is in the order of (batch, rows, heads, width).

    Raises:
        KernelError: The operands do not fit.
    """
    if k.ndim == 4 and 0 < k.shape[1] < q.shape[1] and q.shape[1] % k.shape[1] == 0:
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        dq, dk, dv = attention_gradient(q, k, v, upstream, mask, scale, causal, dropout, seed)
        return dq, torch.unflatten(dk, 1, (-1, group)).sum(2), torch.unflatten(dv, 1, (-1, group)).sum(2)
    q, k, v, upstream = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v, upstream))
    answers = _answers(q, k, v)
    native.extension().attention_gradient(
        native.best("attention_gradient", dtype=DTYPES[q.dtype]).index,
        *(q, k, v, upstream, *answers),
        None if mask is None else mask_of(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2])),
        q.shape[-1] ** -0.5 if scale is None else scale,
        causal,
        drop_below(dropout),
        seed,
        native.threads(),
    )
    return answers[0], answers[1], answers[2]


def _answers(*operands: Tensor) -> list[Tensor]:
    joined = side_by_side(operands)
    if joined is None:
        return [_empty(of) for of in operands]
    begin = min(of.storage_offset() for of in operands)
    memory = torch.empty(joined.numel(), dtype=joined.dtype, device="cpu")
    return [memory.as_strided(of.shape, of.stride(), of.storage_offset() - begin) for of in operands]


def _empty(of: Tensor) -> Tensor:
    batch, heads, rows, width = of.shape
    return torch.empty(batch, rows, heads, width, dtype=of.dtype, device="cpu").transpose(1, 2)


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the view (tensors, *shape) of tensors that fill a run of memory as equal slices of it, or None."""
    first, *others = tensors
    memory, place = first.untyped_storage().data_ptr(), first.storage_offset()
    step = others[0].storage_offset() - place if others else 0
    for index, other in enumerate(others, 1):
        alike = (other.shape, other.stride(), other.dtype) == (first.shape, first.stride(), first.dtype)
        if not alike or other.untyped_storage().data_ptr() != memory or other.storage_offset() != place + index * step:
            return None
    shape, strides = (len(tensors), *first.shape), (step, *first.stride())
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != filled:
            return None
        filled *= size
    return first.as_strided(shape, strides, place) if filled else None
