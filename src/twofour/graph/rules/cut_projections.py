"""Rows cut from a stored weight become weights of their own: how attention reads a fused `in_proj_weight`."""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import Any

from torch import Tensor, fx

from twofour.graph.base import Rule, argument, aten, calls, constant, replace_with, value


def rewrite(module: fx.GraphModule) -> int:
    """Replace the parts of `split` and `chunk` along the first axis of a weight by views of it with their own names.

    torch's attention cuts its weight where query, key and value are not one tensor, and its bias where they have
    weights of their own. A product by such a part takes a packed weight like any other.
    """
    count = 0
    for node in calls(module.graph, aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default):
        source = node.args[0]
        if not _is_weight(source) or argument(node, 2, "dim", 0) != 0:
            continue
        rows = [int(part.shape[0]) for part in value(node)]
        begins = list(accumulate(rows, initial=0))
        for part in [user for user in node.users if user.target is operator.getitem]:
            index = part.args[1]
            assert isinstance(index, int), part.args
            _place(module, part, source, begins[index], rows[index])
            count += 1
    module.graph.eliminate_dead_code()
    return count


def _is_weight(node: Any) -> bool:
    known = isinstance(node, fx.Node) and node.op == "get_attr" and bool(node.meta.get("weight"))
    return known and isinstance(value(node), Tensor)


def _place(module: fx.GraphModule, part: fx.Node, source: fx.Node, begin: int, rows: int) -> None:
    name = f"{source.meta['weight']}.rows_{begin}_{begin + rows}"
    held = getattr(module, str(source.target)).detach().narrow(0, begin, rows)
    replace_with(part, constant(module, part, name, held, part.meta.get("val"), {"weight": name}))


CUT_PROJECTIONS = Rule("rows cut from a weight", rewrite)
