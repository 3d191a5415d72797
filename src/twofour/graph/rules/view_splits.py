"""Splitting into parts of known sizes becomes one view per part that is used."""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import Any

from torch import fx

from twofour.graph.base import Rule, argument, aten, calls, insert, replace_with, value


def rewrite(module: fx.GraphModule) -> int:
    """Replace split and chunk whose parts are taken one by one."""
    count = 0
    for node in calls(module.graph, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
        parts, x = value(node), node.args[0]
        dim = argument(node, 2, "dim", 0)
        sizes = [part.shape[dim] for part in parts]
        taken = all(user.target is operator.getitem and user.op == "call_function" for user in node.users)
        if not taken or not all(isinstance(size, int) for size in sizes):
            continue
        begins = list(accumulate(sizes, initial=0))
        for user in list(node.users):
            index: Any = user.args[1]
            new = insert(user, aten.narrow.default, (x, dim, begins[index % len(parts)], sizes[index]), user)
            replace_with(user, new)
        module.graph.erase_node(node)
        count += 1
    return count


VIEW_SPLITS = Rule("splits into views", rewrite)
