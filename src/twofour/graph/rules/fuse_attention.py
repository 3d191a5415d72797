"""torch's attention operator becomes ours where it computes the same: float32 or bfloat16, no dropout.

Keys and values that were only joined for it, a cache and the new tokens, are read where they stand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from twofour.graph.base import Rule, argument, aten, calls, insert, replace_with, same_axes, value
from twofour.kernels.attention import attention
from twofour.kernels.attention.cpu import DTYPES


def rewrite(module: fx.GraphModule) -> int:
    """Replace scaled_dot_product_attention."""
    count = 0
    for node in calls(module.graph, aten.scaled_dot_product_attention.default):
        q, k, v = node.args[:3]
        mask = argument(node, 3, "attn_mask")
        if argument(node, 4, "dropout_p", 0.0) != 0.0 or not _fits(q, k, v, mask):
            continue
        causal, scale = argument(node, 5, "is_causal", False), argument(node, 6, "scale")
        k, v, k_added, v_added = parts_of(k, v)
        replace_with(node, insert(node, attention, (q, k, v, mask, scale, causal, k_added, v_added), node))
        count += 1
    return count


def _fits(q: Any, k: Any, v: Any, mask: Any) -> bool:
    kinds = {value(operand).dtype if value(operand).ndim == 4 else None for operand in (q, k, v)}
    if len(kinds) > 1 or not kinds <= DTYPES.keys():
        return False
    found = value(mask)
    return mask is None or (isinstance(found, Tensor) and found.dtype in (torch.bool, torch.float32))


def parts_of(k: Any, v: Any) -> tuple[Any, Any, Any, Any]:
    """Return keys and values, and what stands behind each where both were only joined; else them, None and None."""
    (first, k_added), (second, v_added) = _parts(k), _parts(v)
    alike = _cut_alike((first, k_added), (second, v_added))
    return (first, second, k_added, v_added) if alike else (k, v, None, None)


def _parts(joined: Any) -> tuple[Any, Any]:
    """Return the two tensors that a concatenation of keys alone joins, if nothing else reads it; else it and None."""
    if joined.target is not aten.cat.default or len(joined.users) != 1 or argument(joined, 1, "dim", 0) not in (2, -2):
        return joined, None
    parts: Any = joined.args[0]
    two = len(parts) == 2 and all(value(part).dtype is value(joined).dtype and value(part).ndim == 4 for part in parts)
    return (parts[0], parts[1]) if two else (joined, None)


def _cut_alike(keys: tuple[Any, Any], values: tuple[Any, Any]) -> bool:
    """Whether both are joined of two parts at the same place; together they are as long, which attention demands."""
    if keys[1] is None or values[1] is None:
        return False
    return any(same_axes(value(k).shape[2:3], value(v).shape[2:3]) for k, v in zip(keys, values, strict=True))


ATTENTION = Rule("attention fused", rewrite)
