"""Masks that models build from positions: comparisons that always hold and indexing by 0, 1, 2, ... become views.

One that hides nothing, of any sizes or of those of one model, is no mask: attention reads none.
A comparison of keys' positions with queries' is no mask either: attention hides later keys itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from twofour.graph.base import Rule, argument, aten, calls, escapes, insert, replace_with, same_size, value
from twofour.graph.rules.fold_constants import FOLDED
from twofour.kernels.attention import attention

_AND = (aten.__and__.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor)
_SHAPES = (aten.unsqueeze.default, aten.expand.default, aten.view.default)


def rewrite(module: fx.GraphModule) -> int:
    """Replace all kinds; an `and` goes where its readers, attention, spread the rest of the mask themselves."""
    graph, count = module.graph, 0
    for node in calls(graph, *_AND):
        kept = next((b for a, b in (node.args, node.args[::-1]) if _always(a)), None)
        if isinstance(kept, fx.Node) and _spread(node, kept):
            replace_with(node, kept)
            count += 1
    for node in calls(graph, aten.index.Tensor):
        count += _view(node)
    for node in calls(graph, attention):
        count += _show_all(node) or _hide_later(node)
    graph.eliminate_dead_code()
    return count


def _always(node: Any) -> bool:
    """Tell whether a bool tensor is True everywhere, whatever the sizes."""
    found = value(node)
    if not isinstance(node, fx.Node) or not isinstance(found, Tensor) or found.dtype is not torch.bool:
        return False
    if node.target in (aten.new_ones.default, aten.ones.default, aten.ones_like.default):
        return True
    if node.target in (aten.ge.Scalar, aten.ge.Tensor):
        return bool(node.args[1] == 0) and _positions(node.args[0]) is not None
    if node.op == "get_attr" and str(node.target).startswith(FOLDED):  # a buffer may be written to
        return bool(getattr(node.graph.owning_module, str(node.target)).all())
    if node.target in _AND:
        return all(map(_always, node.args))
    return node.target in _SHAPES and _always(node.args[0])


def _spread(node: fx.Node, kept: fx.Node) -> bool:
    """Tell whether every reader takes the smaller mask as the larger one: it is of as many axes, some of size 1."""
    reads = all(user.target is attention and argument(user, 3, "mask") is node for user in node.users)
    same = value(kept).ndim == value(node).ndim and value(kept).dtype is torch.bool
    if same_size(node, kept) and value(kept).dtype is torch.bool:
        return not escapes(node)  # what the caller is given is not the caller's own mask
    return bool(node.users) and same and (reads or (all(user.target in _AND for user in node.users) and _always(node)))


def _show_all(node: fx.Node) -> int:
    """Leave out the mask of attention that hides nothing; returns whether."""
    mask = argument(node, 3, "mask")
    if mask is None or node.kwargs or not _always(mask):
        return 0
    node.args = (*node.args[:3], None, *node.args[4:])
    return 1


def _hide_later(node: fx.Node) -> int:
    """Let attention hide the keys behind each query where its mask, or a part of it, does; returns whether."""
    mask: Any = argument(node, 3, "mask")
    if mask is None or node.kwargs or argument(node, 5, "causal", False) or argument(node, 6, "k_added") is not None:
        return 0
    if _hides_later(mask):
        rest = None
    elif mask.target in _AND and value(mask).dtype is torch.bool:
        rest = next((b for a, b in (mask.args, mask.args[::-1]) if _hides_later(a) and value(b).ndim == 4), None)
        if rest is None or value(rest).dtype is not torch.bool:
            return 0
    else:
        return 0
    node.args = (*node.args[:3], rest, argument(node, 4, "scale"), True, *node.args[6:])
    return 1


def _hides_later(node: Any) -> bool:
    """Tell whether the last two axes of a bool tensor hold key <= query, both counted from 0."""
    while isinstance(node, fx.Node) and node.target is aten.unsqueeze.default:
        axis, ndim = int(str(node.args[1])), value(node).ndim
        if axis % ndim > ndim - 3:
            return False
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target not in (aten.le.Tensor, aten.ge.Tensor):
        return False
    less, more = node.args[:2] if node.target is aten.le.Tensor else node.args[1::-1]
    keys, queries = _positions(less), _positions(more)
    return keys is not None and queries is not None and (keys[1], queries[1]) == (0, 1)


def _positions(node: Any) -> tuple[Any, int] | None:
    """Return the size and the axis, from the last, of arange(size) with axes of size 1 around it."""
    added: list[int] = []  # the axes of size 1, counted from the last, outermost first
    while isinstance(node, fx.Node) and node.target is aten.unsqueeze.default:
        axis, ndim = int(str(node.args[1])), value(node).ndim
        added.append(ndim - 1 - axis if axis >= 0 else -1 - axis)
        node = node.args[0]
    behind = 0
    for at in reversed(added):
        behind += at <= behind
    if not isinstance(node, fx.Node) or node.target is not aten.arange.default or len(node.args) != 1:
        return None
    found = value(node)
    return (node.args[0], behind) if not found.is_floating_point() else None


def _view(node: fx.Node) -> int:
    """Replace x[i, j] with i = 0, 1, ... down one axis and j along a later one by a view of x; returns whether."""
    x, indices = node.args[:2]
    found: Any = value(x)
    if not isinstance(x, fx.Node) or not isinstance(indices, list | tuple) or len(indices) != found.ndim:
        return 0
    places = [_positions(index) for index in indices]
    if any(place is None for place in places):
        return 0
    sizes, behind = zip(*(place for place in places if place is not None), strict=True)
    if list(behind) != sorted(set(behind), reverse=True):
        return 0  # another order of axes, or a diagonal
    new: fx.Node = x
    for axis, size in enumerate(sizes):
        shape = (*value(new).shape[:axis], value(indices[axis]).shape[-1 - behind[axis]], *value(new).shape[axis + 1 :])
        part = insert(node, torch.narrow, (new, axis, 0, size), new)
        part.meta["val"] = value(new).new_empty(shape)
        new = part
    ndim = value(node).ndim
    for axis in range(ndim):
        if ndim - 1 - axis not in behind:
            wider = insert(node, aten.unsqueeze.default, (new, axis), new)
            wider.meta["val"] = value(new).unsqueeze(axis)
            new = wider
    replace_with(node, new)
    return 1


POSITION_MASKS = Rule("masks from positions", rewrite)
