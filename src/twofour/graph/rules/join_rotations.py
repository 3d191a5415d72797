"""Queries and keys side by side in one joined product are turned by their positions in one go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from twofour.graph.base import Rule, argument, aten, calls, insert, same_axes, swaps_heads, value
from twofour.kernels.attention import attention

_MUL, _NARROW = aten.mul.Tensor, (torch.narrow, aten.narrow.default)


@dataclass(frozen=True)
class _Rotation:
    """x cos + (the second half of x negated, then the first) sin, of heads (batch, heads, length, width).

    Attributes:
        heads: x: a transposed view of columns of a product.
        cos: Factor of x.
        sin: Factor of the halves.
        half: Columns of the first half.
    """

    heads: fx.Node
    cos: Any
    sin: Any
    half: int

    @property
    def columns(self) -> tuple[Any, int, int] | None:
        """Return the product, the first column and their number, None where heads are no columns of a wider product."""
        split: Any = self.heads.args[0] if swaps_heads(self.heads) else None
        if split is None or split.target is not aten.view.default:
            return None
        part, size = split.args[0], split.args[1]
        if part.target not in _NARROW or part.args[1] not in (-1, 2) or value(part).ndim != 3:
            return None
        numbers = isinstance(part.args[2], int) and isinstance(part.args[3], int)
        as_they_are = numbers and len(size) == 4 and same_axes(value(split).shape[:2], value(part).shape[:2])
        return (part.args[0], part.args[2], part.args[3]) if as_they_are else None


def rewrite(module: fx.GraphModule) -> int:
    """Turn queries and keys of attention together where their columns follow each other; wanted after products."""
    count = 0
    for node in calls(module.graph, attention):
        q, k = (_rotation(operand) for operand in node.args[:2])
        if (
            q is None
            or k is None
            or not (_of_all_heads(q.cos) and _of_all_heads(q.sin))
            or (q.cos, q.sin, q.half) != (k.cos, k.sin, k.half)
        ):
            continue
        first, behind = q.columns, k.columns
        if first is None or behind is None or first[0] is not behind[0] or first[1] + first[2] != behind[1]:
            continue
        turned = _together(node, q, k, first[0], first[1], first[2] + behind[2])
        heads = value(q.heads).shape[1]
        ends = ((0, heads, node.args[0]), (heads, value(k.heads).shape[1], node.args[1]))
        parts = [insert(node, torch.narrow, (turned, 1, begin, size), old) for begin, size, old in ends]
        node.args = (*parts, *node.args[2:])
        count += 1
    module.graph.eliminate_dead_code()
    return count


def _together(before: fx.Node, q: _Rotation, k: _Rotation, source: Any, begin: int, size: int) -> fx.Node:
    """Return the heads of queries and keys, turned."""
    like: Tensor = value(q.heads)
    batch, length = value(source).shape[:2]
    heads, width = like.shape[1] + value(k.heads).shape[1], like.shape[3]
    split: Any = q.heads.args[0]

    def add(target: Any, args: tuple[Any, ...], columns: Any = width) -> fx.Node:
        new = insert(before, target, args, q.heads)
        new.meta["val"] = like.new_empty((batch, heads, length, columns))
        return new

    part = insert(before, torch.narrow, (source, -1, begin, size), source)
    part.meta["val"] = value(source).narrow(-1, begin, size)
    cut = insert(before, aten.view.default, (part, [*split.args[1][:2], heads, width]), split)
    cut.meta["val"] = value(part).unflatten(-1, (heads, width))
    x = insert(before, aten.transpose.int, (cut, 1, 2), q.heads)
    x.meta["val"] = value(cut).transpose(1, 2)
    low = add(aten.slice.Tensor, (x, 3, 0, q.half), q.half)
    high = add(aten.slice.Tensor, (x, 3, q.half, width), width - q.half)
    halves = add(aten.cat.default, ([add(aten.neg.default, (high,), width - q.half), low], -1))
    return add(aten.add.Tensor, (add(_MUL, (x, q.cos)), add(_MUL, (halves, q.sin))))


def _rotation(node: Any) -> _Rotation | None:
    """Return what a sum that attention alone reads turns, None where it is no rotation."""
    if not isinstance(node, fx.Node) or node.target is not aten.add.Tensor or len(node.users) > 1 or node.kwargs:
        return None
    for one, other in (node.args[:2], node.args[1::-1]):
        if getattr(one, "target", None) is not _MUL or getattr(other, "target", None) is not _MUL:
            return None
        for halves, sin in (other.args[:2], other.args[1::-1]):  # pyright: ignore
            found = _halves(halves)
            if found is None:
                continue
            x, half = found
            for heads, cos in (one.args[:2], one.args[1::-1]):  # pyright: ignore
                if heads is x:
                    return _Rotation(x, cos, sin, half)
    return None


def _of_all_heads(factor: Any) -> bool:
    """Tell whether a factor of (batch, heads, length, width) is the same for every head."""
    sizes = value(factor).shape if isinstance(value(factor), Tensor) else ()
    return len(sizes) < 3 or same_axes(sizes[-3:-2], (1,))


def _halves(node: Any) -> tuple[fx.Node, int] | None:
    """Return x and the size of its first half of cat([-x[..., half:], x[..., :half]], -1)."""
    if getattr(node, "target", None) is not aten.cat.default or argument(node, 1, "dim", 0) not in (-1, 3):
        return None
    parts = node.args[0]
    if len(parts) != 2 or parts[0].target is not aten.neg.default:
        return None
    high, low = parts[0].args[0], parts[1]
    if not all(part.target is aten.slice.Tensor and argument(part, 4, "step", 1) == 1 for part in (high, low)):
        return None
    x, width = low.args[0], value(low.args[0]).shape[-1]
    half = argument(low, 3, "end")
    ends = argument(high, 3, "end")
    whole = (
        high.args[0] is x
        and argument(low, 1, "dim", 0) in (-1, 3)
        and argument(high, 1, "dim", 0) in (-1, 3)
        and argument(low, 2, "start") in (0, None)
        and argument(high, 2, "start") == half
        and (ends is None or ends >= width)
    )
    return (x, half) if whole and isinstance(half, int) and 0 < half < width else None


JOIN_ROTATIONS = Rule("rotations of one product joined", rewrite)
