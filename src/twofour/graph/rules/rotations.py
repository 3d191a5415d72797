"""Heads are turned by their positions in one native call, queries and keys together where one product has them so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from twofour.graph.base import Rule, argument, aten, calls, insert, replace_with, same_axes, swaps_heads, value
from twofour.graph.rules.fuse_heads import columns_of
from twofour.kernels.attention import attention
from twofour.kernels.rotation import DTYPES, rotation

_MUL = aten.mul.Tensor


@dataclass(frozen=True)
class _Rotation:
    """x cos + (the second half of x negated, then the first) sin, of heads (batch, heads, length, width).

    Attributes:
        node: The sum.
        heads: x: the transposed view of heads side by side.
        cos: Factor of x.
        sin: Factor of the halves.
    """

    node: fx.Node
    heads: fx.Node
    cos: fx.Node
    sin: fx.Node

    @property
    def columns(self) -> tuple[fx.Node, int, int] | None:
        """Return (batch, length, columns) with the heads, their first column there and their number."""
        found = columns_of(self.heads)
        return found if found is not None and isinstance(found[1], int) and isinstance(found[2], int) else None


def rewrite(module: fx.GraphModule) -> int:
    """Replace rotations of heads that stand side by side; returns how many calls there are."""
    found = {node: one for node in calls(module.graph, aten.add.Tensor) if (one := _rotation(node)) is not None}
    count = 0
    for node in calls(module.graph, attention):
        pair = [found.get(operand) for operand in node.args[:2]]
        q, k = pair
        if q is None or k is None or not _side_by_side(q, k):
            continue
        _place(node, (q, k))
        del found[q.node], found[k.node]
        count += 1
    for one in found.values():
        _place(one.node, (one,))
    module.graph.eliminate_dead_code()
    return count + len(found)


def _side_by_side(q: _Rotation, k: _Rotation) -> bool:
    """Tell whether keys follow queries in one product and are turned alike, and attention alone reads either."""
    first, behind = q.columns, k.columns
    alone = len(q.node.users) == len(k.node.users) == 1 and q.node is not k.node
    if not alone or first is None or behind is None or (q.cos, q.sin) != (k.cos, k.sin):
        return False
    return first[0] is behind[0] and first[1] + first[2] == behind[1]


def _place(before: fx.Node, turned: Iterable[_Rotation]) -> None:
    """Put one call in front of a node for rotations of columns that follow each other."""
    first, *others = turned
    columns = first.columns
    if columns is None:  # heads of a normalisation, say: a view lays them side by side
        source = insert(before, aten.flatten.using_ints, (first.heads.args[0], 2, 3), first.heads)
        source.meta["val"] = value(first.heads).transpose(1, 2).flatten(2)
        columns = source, 0, value(source).shape[-1]
    source, begin, size = columns
    ends = [(0, size, first)]
    for one in others:
        _, at, more = one.columns or columns
        ends.append((at - begin, more, one))
    whole = sum(more for _, more, _ in ends)
    like: Tensor = value(first.node)
    new = insert(before, rotation, (source, _factor(first.cos), _factor(first.sin), begin, whole), source)
    new.meta["val"] = like.new_empty((*value(source).shape[:2], whole))
    for at, more, one in ends:
        replace_with(one.node, _heads(before, one, new, at, more))


def _heads(before: fx.Node, one: _Rotation, turned: fx.Node, begin: int, size: int) -> fx.Node:
    """Return the heads of turned columns, as the sum answered them."""
    width = value(one.node).shape[3]
    part = (
        turned if value(turned).shape[-1] == size else insert(before, torch.narrow, (turned, -1, begin, size), turned)
    )
    part.meta["val"] = value(turned).narrow(-1, begin, size)
    split = insert(before, aten.unflatten.int, (part, -1, [size // width, width]), part)
    split.meta["val"] = value(part).unflatten(-1, (size // width, width))
    heads = insert(before, aten.transpose.int, (split, 1, 2), split)
    heads.meta["val"] = value(split).transpose(1, 2)
    return heads


def _factor(node: fx.Node) -> fx.Node:
    """Return what a factor is before it is rounded to bfloat16 for heads of that type: the call reads float32 too."""
    source: Any = node.args[0] if node.target is aten.to.dtype else None
    if source is None or node.args[1:] != (torch.bfloat16,) or value(source).dtype is not torch.float32:
        return node
    return source


def _rotation(node: Any) -> _Rotation | None:
    """Return what a sum turns, None where it is no rotation of heads that stand side by side."""
    if node.kwargs or len(node.args) != 2:
        return None
    for one, other in (node.args, node.args[::-1]):
        if getattr(one, "target", None) is not _MUL or getattr(other, "target", None) is not _MUL:
            return None
        for halves, sin in (other.args[:2], other.args[1::-1]):  # pyright: ignore
            x = _of_halves(halves)
            for heads, cos in (one.args[:2], one.args[1::-1]):  # pyright: ignore
                if x is not None and heads is x and _fits(node, x, cos, sin):
                    return _Rotation(node, x, cos, sin)
    return None


def _fits(node: fx.Node, heads: fx.Node, cos: Any, sin: Any) -> bool:
    """Tell whether heads are of one type and factors the same for all of them."""
    found, y = value(heads), value(node)
    if not swaps_heads(heads) or found.ndim != 4 or found.dtype not in DTYPES or y.dtype is not found.dtype:
        return False
    factors = [value(factor) for factor in (cos, sin)]
    if not all(isinstance(factor, Tensor) and factor.dtype in DTYPES for factor in factors):
        return False
    alike = same_axes(y.shape, found.shape) and value(_factor(cos)).dtype is value(_factor(sin)).dtype
    return alike and all(_of_all_heads(factor.shape, found.shape) for factor in factors)


def _of_all_heads(factor: Any, heads: Any) -> bool:
    """Tell whether a factor of such sizes has a row for each position, and the same for every head."""
    if (
        not 2 <= len(factor) <= 4
        or not same_axes(factor[-2:], heads[-2:])
        or not all(isinstance(n, int) for n in heads[1::2])
    ):
        return False
    batch = len(factor) < 4 or same_axes(factor[:1], (1,)) or same_axes(factor[:1], heads[:1])
    return batch and (len(factor) < 3 or same_axes(factor[-3:-2], (1,)))


def _of_halves(node: Any) -> fx.Node | None:
    """Return x of cat([-x[..., half:], x[..., :half]], -1), of two equal halves."""
    if getattr(node, "target", None) is not aten.cat.default or argument(node, 1, "dim", 0) not in (-1, 3):
        return None
    parts = node.args[0]
    if len(parts) != 2 or parts[0].target is not aten.neg.default:
        return None
    high, low = parts[0].args[0], parts[1]
    if not all(part.target is aten.slice.Tensor and argument(part, 4, "step", 1) == 1 for part in (high, low)):
        return None
    x, width = low.args[0], value(low.args[0]).shape[-1]
    half, ends = argument(low, 3, "end"), argument(high, 3, "end")
    whole = (
        high.args[0] is x
        and argument(low, 1, "dim", 0) in (-1, 3)
        and argument(high, 1, "dim", 0) in (-1, 3)
        and argument(low, 2, "start") in (0, None)
        and argument(high, 2, "start") == half
        and (ends is None or ends >= width)
    )
    return x if whole and isinstance(half, int) and 2 * half == width else None


ROTATIONS = Rule("heads turned by positions", rewrite)
