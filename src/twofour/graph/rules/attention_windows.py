"""Attention inside windows of an image, as Swin has it, reads and writes the rows where they stand.

A model cuts its image into windows, shifted ones too, and lays them out anew before the products of queries, keys and
values; behind the output layer it puts them back. Products work on each row by itself, so that only attention needs to
know which rows are a window: the copies vanish, and the residual sum goes into the output layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from twofour.graph.base import (
    Rule,
    argument,
    aten,
    calls,
    constant,
    insert,
    is_float32,
    product,
    product_of,
    same_axes,
    value,
)
from twofour.kernels.attention import attention_of_windows

_MOVES = (
    aten.view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.roll.default,
)
"""What puts rows elsewhere and keeps each whole."""

_MASKS = (*_MOVES, aten.expand.default, aten.unsqueeze.default, aten.add.Tensor)

LARGEST = 1 << 20
"""Numbers that the mask of an image's windows may have: it is computed once and kept."""


def rewrite(module: fx.GraphModule) -> int:
    """Replace attention of four axes between windows that are cut from images and put back; of plain products."""
    count = 0
    for node in calls(module.graph, aten.scaled_dot_product_attention.default):
        found = _Windows.find(node)
        if found is not None:
            found.replace(module)
            count += 1
    module.graph.eliminate_dead_code()
    return count


class _Windows:
    """One place: the attention, the products before it, the one behind it, and what they are without windows.

    Args:
        node: The attention.
        products: Those of queries, keys and values, of one input.
        behind: The output layer's.
    """

    def __init__(self, node: fx.Node, products: list[fx.Node], behind: fx.Node) -> None:
        self.node, self.products, self.behind = node, products, behind
        self.source: Any = None
        self.last: Any = None
        self.order: Any = None
        self.mask: Any = None

    @classmethod
    def find(cls, node: fx.Node) -> _Windows | None:
        """Return what attention stands between, None where that is no cutting and putting back of windows."""
        if argument(node, 4, "dropout_p", 0.0) or argument(node, 5, "is_causal", False) or not is_float32(node):
            return None
        products = [one for one in map(_product_of_heads, node.args[:3]) if one is not None]
        behind = _product_behind(node)
        widths = [value(operand).shape[-1] for operand in node.args[:3]]
        if not same_axes(widths, widths[:1] * 3):
            return None
        if behind is None or len(products) < 3 or any(one.args[0] is not products[0].args[0] for one in products):
            return None
        found = cls(node, products, behind)
        return found if found.places() and found.puts_back() and found.masks() else None

    def places(self) -> bool:
        """Find the image that windows are cut from: the first tensor (images, rows, columns) whose rows they are."""
        cut: Any = self.products[0].args[0]
        chain: list[fx.Node] = []
        fitting = []
        while isinstance(cut, fx.Node) and cut.target in _MOVES:
            chain.insert(0, cut)
            cut = cut.args[0]
            if isinstance(cut, fx.Node) and is_float32(cut) and value(cut).ndim == 3:
                fitting.append((cut, list(chain)))
        for source, moves in reversed(fitting):
            self.source, self.order = source, self.windows_of(source, moves)
            if self.order is not None:
                return True
        return False

    def windows_of(self, source: fx.Node, moves: list[fx.Node]) -> Tensor | None:
        """Return (windows, rows of one), which rows of an image each window has, if that holds for all images."""
        cut = moves[-1]
        if not _plain_sizes(source, cut) or value(cut).ndim != 3:
            return None
        rows = _size(value(source).shape[1])
        for images in _image_counts(source):
            here = _moved(_numbered(images, source), moves, source, images)
            if here is None or here.ndim != 3 or not bool((here == here[..., :1]).all()):
                return None
            one = here[: here.shape[0] // images, :, 0]
            image = torch.arange(images, device="cpu")[:, None, None] * rows
            if not torch.equal(here[..., 0], (one + image).flatten(0, 1)):
                return None
        return one.contiguous()

    def puts_back(self) -> bool:
        """Find the node where the rows stand as in the image again."""
        moves: list[fx.Node] = []
        node: Any = self.behind
        while len(node.users) == 1 and (node := next(iter(node.users))).target in _MOVES:
            moves.append(node)
            if value(node).ndim == 3 and self.returns(moves):
                self.last = node
                return True
        return False

    def returns(self, moves: list[fx.Node]) -> bool:
        """Tell whether moving the windows of numbered rows numbers them in order again."""
        if not _plain_sizes(self.source, moves[-1]):
            return False
        for images in _image_counts(self.source):
            image = _numbered(images, self.behind, self.source)
            back = _moved(image[:, self.order].flatten(0, 1), moves, self.source, images)
            if back is None or not torch.equal(back, image):
                return False
        return True

    def masks(self) -> bool:
        """Find the mask of an image's windows, computed from constants and the same for each image."""
        given = argument(self.node, 3, "attn_mask")
        if given is None:
            return True
        module = self.node.graph.owning_module
        windows, rows = self.order.shape
        for images in _image_counts(self.source):
            found = _constant(module, given, self.source, images)
            if found is None or found.ndim != 4 or found.shape[2:] != (rows, rows):
                return False
            one = found[: found.shape[0] // images] if found.shape[0] > 1 else found
            if one.shape[0] not in (1, windows) or (
                found.shape[0] > 1 and not torch.equal(found, one.repeat(images, 1, 1, 1))
            ):
                return False
        self.mask = one
        return one.numel() <= LARGEST and one.dtype in (torch.float32, torch.bool)

    def replace(self, module: fx.GraphModule) -> None:
        """Let the products work on the image's rows, and attention on windows of them."""
        images, rows = value(self.source).shape[:2]

        def on_rows(x: fx.Node, before: fx.Node, like: fx.Node) -> fx.Node:
            new = insert(before, product, (x,), like, product=like.meta["product"])
            new.meta["val"] = value(self.source).new_empty((images, rows, value(like).shape[-1]))
            return new

        made = {one: on_rows(self.source, self.node, one) for one in dict.fromkeys(self.products)}
        operands = [made[one] for one in self.products]
        order, mask = (
            None if held is None else constant(module, self.node, f"_windows_{kind}_{self.node.name}", held, held)
            for kind, held in (("order", self.order), ("mask", self.mask))
        )
        width = _size(value(self.node.args[0]).shape[-1])
        args = (*operands, order, width, mask, argument(self.node, 6, "scale"))
        new = insert(self.node, attention_of_windows, args, operands[0], label="attention")
        old = [self.node]  # each alone reads the one before it
        while old[-1] is not self.last:
            old.append(next(iter(old[-1].users)))
        self.last.replace_all_uses_with(on_rows(new, self.behind, self.behind))
        for one in reversed(old):
            module.graph.erase_node(one)


def _product_of_heads(operand: Any) -> fx.Node | None:
    """Return the plain product whose columns, split into heads, are an operand (batch, heads, rows, width)."""
    if not isinstance(operand, fx.Node) or operand.target is not aten.transpose.int or operand.args[1:] != (1, 2):
        return None
    split: Any = operand.args[0]
    if split.target not in (aten.view.default, aten.reshape.default) or value(split).ndim != 4:
        return None
    source: Any = split.args[0]
    found = product_of(source)
    alone = len(operand.users) == len(split.users) == 1
    if found is None or not found.epilogue.plain or not alone or value(source).ndim != 3:
        return None
    width = value(split).shape[-1]
    whole = _size(width) is not None and _size(value(source).shape[-1]) is not None
    return source if whole and _same_rows(source, split) else None


def _same_rows(source: fx.Node, split: fx.Node) -> bool:
    """Tell whether a split of columns leaves the rows of each window where they are."""
    return same_axes(value(source).shape[1:2], value(split).shape[1:2])


def _product_behind(node: fx.Node) -> fx.Node | None:
    """Return the plain product that alone reads the heads joined again."""
    path: list[fx.Node] = [node]
    while len(path[-1].users) == 1 and len(path) < 5:
        path.append(next(iter(path[-1].users)))
        if (found := product_of(path[-1])) is not None:
            joins = [one for one in path[1:-1] if one.target not in (aten.contiguous.default, aten.clone.default)]
            heads = len(joins) == 2 and joins[0].target is aten.transpose.int and joins[0].args[1:] == (1, 2)
            whole = heads and joins[1].target in (aten.view.default, aten.reshape.default)
            same = whole and value(joins[1]).ndim == 3 and _same_rows(joins[0], joins[1])
            return path[-1] if same and found.epilogue.plain and path[-1].args == (path[-2],) else None
    return None


def _image_counts(source: fx.Node) -> tuple[int, ...]:
    """Return the numbers of images to look at: what holds for one, two and three of them holds for more.

    Sizes grow with their number in proportion, and rolls turn axes of a fixed size alone: see `_moved` and `_numbers`.
    """
    images = _size(value(source).shape[0])
    return (1, 2, 3) if images is None else (images,)


def _plain_sizes(*nodes: fx.Node) -> bool:
    """Tell whether only the number of images is a symbol."""
    return all(_size(size) is not None for node in nodes for size in value(node).shape[1:])


def _size(size: Any) -> Any:
    """Return a size as a number, also where torch found only later that it is one; None of a symbol."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def _numbered(images: int, columns_of: fx.Node, rows_of: fx.Node | None = None) -> Tensor:
    """Return (images, rows, columns) that holds the number of each row."""
    rows, columns = _size(value(rows_of or columns_of).shape[1]), _size(value(columns_of).shape[-1])
    numbers = torch.arange(images * rows, dtype=torch.int64, device="cpu")
    return numbers.view(images, rows, 1).expand(-1, -1, columns).contiguous()


def _moved(x: Tensor, moves: list[fx.Node], source: fx.Node, images: int) -> Tensor | None:
    """Return what the calls make of `x` for so many images, None where that depends on more."""
    for move in moves:
        if not _rolls_fixed_axes(move):
            return None
        rest = _numbers((move.args[1:], dict(move.kwargs)), source, images)
        if rest is None:
            return None
        target = aten.reshape.default if move.target is aten.view.default else move.target
        x = target(x, *rest[0], **rest[1])  # pyright: ignore[reportCallIssue]
    return x


def _rolls_fixed_axes(move: fx.Node) -> bool:
    """Tell whether a call rolls no axis whose size follows the number of images: for some it would change nothing."""
    if move.target is not aten.roll.default:
        return True
    axes: Any = argument(move, 2, "dims", ())
    sizes = value(move.args[0]).shape
    return bool(axes) and all(_size(sizes[axis]) is not None for axis in axes)


def _numbers(arguments: Any, source: fx.Node, images: int) -> Any:
    """Return arguments with their sizes as numbers, None where one is no function of the number of images."""
    symbol = value(source).shape[0]
    bad: list[fx.Node] = []

    def number(node: fx.Node) -> Any:
        size = value(node)
        if isinstance(size, torch.SymInt) and isinstance(symbol, torch.SymInt):
            grows = size.node.expr.as_poly(symbol.node.expr)  # None where it is no polynomial of the number
            if grows is not None and grows.degree() == 1:
                return int(size.node.expr.xreplace({symbol.node.expr: images}))
        known = _size(size) if isinstance(size, int | torch.SymInt) else None
        if known is None:
            bad.append(node)
        return known

    found = map_arg(arguments, number)
    return None if bad else found


def _constant(module: Any, node: Any, source: fx.Node, images: int) -> Tensor | None:
    """Return the value of a mask for so many images, None where it depends on more."""
    if node.op == "get_attr":
        found = getattr(module, str(node.target))
        return found if isinstance(found, Tensor) else None
    if node.op != "call_function" or node.target not in _MASKS or not _rolls_fixed_axes(node):
        return None
    tensors = [given for given in node.args if isinstance(given, fx.Node) and isinstance(value(given), Tensor)]
    known = {given: _constant(module, given, source, images) for given in tensors}
    if any(found is None for found in known.values()):
        return None
    rest = _numbers(([given for given in node.args if given not in known], dict(node.kwargs)), source, images)
    if rest is None:
        return None
    others: Iterator[Any] = iter(rest[0])
    args = [known[given] if isinstance(given, fx.Node) and given in known else next(others) for given in node.args]
    return node.target(*args, **rest[1])


ATTENTION_WINDOWS = Rule("windows read in place", rewrite)
