"""torch's attention operator becomes ours where it computes the same: float32, no dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from twofour.graph.base import Rule, argument, aten, calls, insert, is_float32, replace_with, value
from twofour.kernels.attention import attention


def rewrite(module: fx.GraphModule) -> int:
    """Replace scaled_dot_product_attention."""
    count = 0
    for node in calls(module.graph, aten.scaled_dot_product_attention.default):
        q, k, v = node.args[:3]
        mask = argument(node, 3, "attn_mask")
        if argument(node, 4, "dropout_p", 0.0) != 0.0 or not _fits(q, k, v, mask):
            continue
        causal, scale = argument(node, 5, "is_causal", False), argument(node, 6, "scale")
        replace_with(node, insert(node, attention, (q, k, v, mask, scale, causal), node))
        count += 1
    return count


def _fits(q: Any, k: Any, v: Any, mask: Any) -> bool:
    if not all(is_float32(operand) and value(operand).ndim == 4 for operand in (q, k, v)):
        return False
    found = value(mask)
    return mask is None or (isinstance(found, Tensor) and found.dtype in (torch.bool, torch.float32))


ATTENTION = Rule("attention fused", rewrite)
