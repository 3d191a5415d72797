"""Key and value heads that a model repeats for several query heads are read as they are: attention shares them.

Those of a cache and of new tokens are then no longer joined either.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from twofour.graph.base import Rule, argument, aten, calls, same_axes, value
from twofour.graph.rules.fuse_attention import parts_of
from twofour.kernels.attention import attention

_JOINS = (aten.reshape.default, aten.view.default, aten.flatten.using_ints)


def rewrite(module: fx.GraphModule) -> int:
    """Let attention read keys and values before they are repeated; returns how many calls do."""
    count = 0
    for node in calls(module.graph, attention):
        keys, values = map(_before_repeating, node.args[1:3])
        if argument(node, 6, "k_added") is not None or keys is None or values is None:
            continue
        # as many keys as values there are since attention took them
        if same_axes(value(keys).shape[:2], value(values).shape[:2]):
            node.args = (node.args[0], keys, values, *node.args[3:])
            count += 1
    module.graph.eliminate_dead_code()
    for node in calls(module.graph, attention) if count else ():
        if argument(node, 6, "k_added") is None:
            k, v, k_added, v_added = parts_of(*node.args[1:3])
            node.args = (node.args[0], k, v, *node.args[3:6], k_added, v_added, *node.args[8:])
    module.graph.eliminate_dead_code()
    return count


def _before_repeating(joined: Any) -> Any:
    """Return (batch, key heads, keys, width) of what holds each head several times in a row, None of anything else."""
    if not isinstance(joined, fx.Node):
        return None
    if joined.target is aten.repeat_interleave.self_int and argument(joined, 2, "dim") in (1, -3):
        return joined.args[0]
    wide: Any = joined.args[0] if joined.target in _JOINS else None
    if not isinstance(wide, fx.Node) or wide.target is not aten.expand.default or value(wide).ndim != 5:
        return None
    one: Any = wide.args[0]
    if one.target is not aten.unsqueeze.default or one.args[1] not in (2, -3) or value(one).ndim != 5:
        return None
    batch, heads, times, keys, width = value(wide).shape
    source = one.args[0]
    same = same_axes(value(source).shape, (batch, heads, keys, width))
    return source if same and same_axes(value(joined).shape, (batch, heads * times, keys, width)) else None


SHARED_HEADS = Rule("heads repeated for attention", rewrite)
