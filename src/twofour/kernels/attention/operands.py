"""Operands of attention in torch: which fit together, and how a mask is handed on."""

from __future__ import annotations

import torch
from torch import Tensor

from twofour.errors import KernelError

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""dtypes of the operands, as the table calls them; scores and their softmax are float32 in both."""


def one_for_all(mask: Tensor | None) -> bool:
    """Tell whether a mask (.., heads, queries, keys) hides the same keys from every query of every head."""
    return mask is None or all(
        mask.shape[axis] == 1 or mask.stride(axis) == 0 for axis in (-3, -2) if mask.ndim >= -axis
    )


def require_windows(q: Tensor, k: Tensor, v: Tensor, order: Tensor, width: int) -> None:
    """Refuse what is no set of images with as many rows each, or no order of them; the border looks at its values."""
    alike = q.dtype is k.dtype is v.dtype and q.dtype in DTYPES and q.ndim == k.ndim == v.ndim == 3
    if not alike or order.ndim != 2 or width < 1 or any(t.shape[-1] % width for t in (q, k, v)):
        shown = ", ".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in (("q", q), ("k", k), ("v", v)))
        raise KernelError(
            "the operands of attention in windows do not fit",
            got=f"{shown}, order {tuple(order.shape)}, heads of {width}",
            wanted="float32 or bfloat16 (images, rows, heads * width) alike, and order (windows, rows of one)",
        )


def sizes_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int, int]:
    """Return batch, heads, queries, keys, width and value width, or refuse operands that do not fit."""
    good = (
        q.dtype is k.dtype is v.dtype
        and q.dtype in DTYPES
        and q.ndim == k.ndim == v.ndim == 4
        and q.is_cpu
        and k.is_cpu
        and v.is_cpu
    )
    if good:
        batch, heads, queries, width = q.shape
        key_batch, key_heads, keys, key_width = k.shape
        value_batch, value_heads, value_keys, value_width = v.shape
        fits = batch == key_batch == value_batch and key_heads == value_heads and keys == value_keys
        if fits and width == key_width and width and key_heads and heads % key_heads == 0:
            return batch, heads, queries, keys, width, value_width
    raise KernelError(
        "the operands of attention do not fit",
        got=", ".join(f"{name} {t.dtype} {tuple(t.shape)} on {t.device}" for name, t in (("q", q), ("k", k), ("v", v))),
        wanted="float32 or bfloat16 on cpu: q (batch, heads, n, d), k (batch, key heads, m, d) and v (.., m, e) alike",
    )


def added_rows(k: Tensor, v: Tensor, k_added: Tensor | None, v_added: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return further keys and values with a contiguous last axis, or refuse what cannot stand behind `k` and `v`."""
    if k_added is not None and v_added is not None and k_added.ndim == v_added.ndim == 4:
        pairs = ((k, k_added), (v, v_added))
        alike = all(a.dtype is b.dtype and b.is_cpu and _beside(a) == _beside(b) for a, b in pairs)
        if alike and k_added.shape[2] == v_added.shape[2]:
            last = (t if t.stride(3) == 1 else t.contiguous() for t in (k_added, v_added))
            return next(last), next(last)
    given = (("k", k), ("v", v), ("k_added", k_added), ("v_added", v_added))
    raise KernelError(
        "the added keys and values of attention do not fit",
        got=", ".join(f"{name} {None if t is None else (t.dtype, tuple(t.shape))}" for name, t in given),
        wanted="both or neither, on cpu: as k and v but for the number of keys, which both share",
    )


def _beside(t: Tensor) -> tuple[int, int, int]:
    return t.shape[0], t.shape[1], t.shape[3]


def mask_of(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Return the mask expanded, with a contiguous last axis; a copy for that is of what it has of its own."""
    try:
        wide = mask.expand(shape)
    except RuntimeError:
        wide = None
    if wide is None or mask.dtype not in (torch.float32, torch.bool) or not mask.is_cpu:
        raise KernelError(
            "the mask of attention does not fit",
            got=f"{mask.dtype} {tuple(mask.shape)} on {mask.device}",
            wanted=f"bool or float32 on cpu that broadcasts to {shape}",
        )
    if wide.stride(3) == 1 or shape[3] == 1:
        return wide
    own = wide[tuple(slice(None) if stride else slice(1) for stride in wide.stride()[:3])]
    return own.contiguous().expand(shape)
