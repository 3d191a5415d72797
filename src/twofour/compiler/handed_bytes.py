"""Activations between layers in bytes: who makes what int8 products of a static range read writes it as they read it.

A product of a static range rounds each input to a byte before it multiplies. Where that input comes from a product, a
normalisation or attention, these round it once, as they store it: fewer bytes, and no pass over them. Nothing else is
rounded: sums of residuals, and what attention reads, stay as they are. Later rewrites (`normed`, `mlp`) make one call
of products and norms that hand bytes on.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from twofour.compiler.fused_matmuls import HANDED
from twofour.compiler.layer import CompiledLinear
from twofour.graph.base import argument, aten, insert, product_of, value
from twofour.kernels.attention import attention
from twofour.kernels.norm import DTYPES, norm, norm_in_place, norm_to_bytes
from twofour.kernels.quantization import Quantization

IN_BYTES = "activations between layers in bytes"
"""What the account calls it: a rewrite that rounds where the layers did before."""

_VIEWS = (
    aten.transpose.int,
    aten.contiguous.default,
    aten.clone.default,
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
)
"""What stands between attention and the product of its joined heads."""

Layers = Mapping[str, CompiledLinear]


def hand_on_bytes(module: fx.GraphModule, layers: Layers) -> int:
    """Let products, normalisations and attention write bytes where products of a static range read their answers.

    Wanted is a graph after `fuse`, its products not yet given kernels, its activations in the types they keep.

    Args:
        module: The graph; it is changed.
        layers: The compiled layers by name.

    Returns:
        How many tensors are bytes now.
    """
    count = 0
    for node in list(module.graph.nodes):
        if product_of(node) is not None:
            count += _from_product(node, layers)
        elif node.target in (norm, norm_in_place):
            count += _from_norm(node, layers)
        elif node.target is attention:
            count += _from_attention(node, layers)
    module.graph.lint()
    return count


def static_range(node: Any, layers: Layers) -> Quantization | None:
    """Return the range by which a product rounds its input to bytes, None where it has none or several."""
    product = product_of(node)
    if product is None or any(source.layer not in layers for source in product.sources):
        return None
    first, *others = {layers[source.layer].problem.quantization for source in product.sources}
    return None if others or first.dynamic or not first.plain else first


def _readers(node: fx.Node, layers: Layers) -> tuple[list[fx.Node], Quantization | None]:
    """Return the products that read a node as bytes of one range, and that range."""
    ranges = {
        user: found
        for user in node.users
        if user.args and user.args[0] is node and (found := static_range(user, layers)) is not None
    }
    alone = {user: found for user, found in ranges.items() if [*user.args, *user.kwargs.values()].count(node) == 1}
    first = next(iter(alone.values()), None)
    return [user for user, found in alone.items() if found == first], first


def _from_product(node: fx.Node, layers: Layers) -> int:
    """Let a product answer in bytes where products of one range alone read it."""
    product = product_of(node)
    assert product is not None
    readers, found = _readers(node, layers)
    ours = all(source.layer in layers for source in product.sources)
    if found is None or len(readers) < len(node.users) or not ours or not _combines_floats(node):
        return 0
    node.meta[HANDED] = found
    _mark(node)
    return 1


def _combines_floats(node: fx.Node) -> bool:
    """Tell whether a product has no second operand, or one of float32: what rows of whole answers read."""
    return all(value(other).dtype is torch.float32 for other in node.args[1:] if isinstance(other, fx.Node))


def _from_norm(node: fx.Node, layers: Layers) -> int:
    """Let a normalisation write bytes besides, or alone where nobody else reads it."""
    readers, found = _readers(node, layers)
    if found is None or value(node).dtype not in DTYPES:
        return 0
    centred, dtype = argument(node, 4, "centred", True), argument(node, 5, "dtype")
    keep, there = len(readers) < len(node.users), node.target is norm_in_place
    args = (*node.args[:4], centred, found.x_scale, found.x_zero, dtype, keep, there)
    new = insert(node, norm_to_bytes, args, node)
    real, whole = value(node), value(node).to(torch.uint8)
    if keep:
        new.meta = {"val": (real, whole)}
        with node.graph.inserting_before(node):
            parts = [node.graph.call_function(operator.getitem, (new, i)) for i in range(2)]
        parts[0].meta, parts[1].meta = {"val": real}, {"val": whole}
    else:
        new.meta, parts = {"val": whole}, [new, new]
    for reader in readers:
        reader.replace_input_with(node, parts[1])
    node.replace_all_uses_with(parts[0])
    node.graph.erase_node(node)
    return 1


def _from_attention(node: fx.Node, layers: Layers) -> int:
    """Let attention answer in bytes where products of one range alone read its heads, joined."""
    chain = [node]
    while len(chain[-1].users) == 1 and (reader := next(iter(chain[-1].users))).target in _VIEWS:
        chain.append(reader)
    readers, found = _readers(chain[-1], layers)
    if found is None or len(readers) < len(chain[-1].users):
        return 0
    rest = (argument(node, 3 + place, name, default) for place, (name, default) in enumerate(_OPTIONS.items()))
    node.args, node.kwargs = (*node.args[:3], *rest, found.x_scale, found.x_zero), {}
    for one in chain:
        _mark(one)
    return 1


_OPTIONS = {"mask": None, "scale": None, "causal": False, "k_added": None, "v_added": None, "unseen": 0.0}
"""Arguments of attention behind its operands, with their defaults."""


def _mark(node: fx.Node) -> None:
    """Note that a node's tensor holds bytes."""
    seen = value(node)
    assert isinstance(seen, Tensor)
    node.meta["val"] = seen.to(torch.uint8)
