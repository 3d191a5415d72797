"""Images between convolutions in bytes, or in bfloat16: who makes what convolutions in int8 read writes it shorter.

Such a convolution rounds each number of its input to a byte before it multiplies. Where a convolution makes that input
for it alone and its range is static, this one rounds the number once, as it stores it: a quarter of the bytes, and no
pass over them. What a residual sum reads too is bfloat16, as activations between the layers of an int8 graph are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx

from twofour.compiler.graph_conv import ConvLayer
from twofour.graph.base import aten, insert, is_float32, value
from twofour.kernels.quantization import Quantization

IMAGES_IN_BYTES = "images between convolutions in bytes"
"""What the account calls it: a rewrite that rounds where the layers did before."""

IMAGES_LOWERED = "images between convolutions in bfloat16"
"""The same of the other one, which rounds."""


def hand_on_images(module: fx.GraphModule) -> int:
    """Let convolutions in int8 write bytes where convolutions of one static range alone read their answers.

    Args:
        module: The graph, its convolutions placed; it is changed.

    Returns:
        How many images are bytes now.
    """
    layers, count = _in_int8(module), 0
    for node, layer in layers.items():
        ranges = {_reads_by(layers.get(user), user, node) for user in node.users}
        found = ranges.pop() if len(ranges) == 1 else None
        if found is not None:
            _answer(node, layer, torch.uint8, y_scale=found.x_scale, y_zero=found.x_zero)
            count += 1
    return count


def lower_images(module: fx.GraphModule) -> int:
    """Let convolutions in int8 write bfloat16 where convolutions in int8 read it, as their input or to add it.

    Others read float32: a conversion stands before them.

    Args:
        module: The graph, its convolutions placed; it is changed.

    Returns:
        How many images are bfloat16 now.
    """
    layers = _in_int8(module)
    low = {node for node in layers if is_float32(node) and any(user in layers for user in node.users)}
    for node in filter(is_float32, layers):  # else the type of an answer is that of its input
        _answer(node, layers[node], torch.bfloat16 if node in low else torch.float32)
    for node in low:
        others = [user for user in node.users if user not in layers]
        if others:
            new = insert(node.next, aten.to.dtype, (node, torch.float32), node)
            new.meta["val"] = value(node).to(torch.float32)
            for user in others:
                user.replace_input_with(node, new)
    module.graph.lint()
    return len(low)


def _in_int8(module: fx.GraphModule) -> dict[fx.Node, ConvLayer]:
    """Return the convolutions whose kernels multiply whole numbers, by their nodes, in the graph's order."""
    called = {node: module.get_submodule(str(node.target)) for node in module.graph.nodes if node.op == "call_module"}
    layers = {node: layer for node, layer in called.items() if isinstance(layer, ConvLayer)}
    return {node: layer for node, layer in layers.items() if layer.dispatch.kernels[0].dtype == "int8"}


def _reads_by(layer: ConvLayer | None, user: fx.Node, node: fx.Node) -> Quantization | None:
    """Return the static range by which a convolution reads a node's images, None where it is no such or adds them."""
    if layer is None or [*user.args, *user.kwargs.values()].count(node) != 1 or user.args[0] is not node:
        return None
    ranged = layer.problem.quantization
    return None if ranged.dynamic else Quantization(ranged.x_scale, ranged.x_zero)


def _answer(node: fx.Node, layer: ConvLayer, dtype: torch.dtype, **options: float | int | None) -> None:
    """Let a convolution answer in another type."""
    seen = value(node)
    assert isinstance(seen, Tensor)
    layer.problem = replace(layer.problem, quantization=replace(layer.problem.quantization, y_dtype=dtype, **options))
    node.meta["val"] = seen.to(dtype)
