"""Squeeze-and-excite in a graph: mean of channels, two small products, a gate and its product become one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from twofour.compiler.conv import CompiledConv
from twofour.compiler.fused_matmuls import ProductLayer
from twofour.compiler.graph_conv import ConvLayer
from twofour.compiler.plan import LayerPlan
from twofour.graph.base import argument, aten, calls, is_float32, replace_with, same_axes, value
from twofour.kernels.epilogue import ACTIVATIONS
from twofour.kernels.squeeze_excite import SqueezeExcite
from twofour.packing import dense_of

SQUEEZED = "squeeze-and-excite fused"
"""What the plan calls the rewrite."""

_GATES: dict[Any, str] = {
    aten.sigmoid.default: "sigmoid",
    aten.hardsigmoid.default: "hardsigmoid",
}
"""Operator -> the key of `squeeze_excite.GATES`."""

_VIEWS = (
    *(aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.squeeze.dims, aten.squeeze.dim),
    *(aten.unsqueeze.default, aten.expand.default, aten.expand_as.default, aten.contiguous.default),
)
"""What may stand between the steps: (images, channels) with or without two axes of size 1."""


class SqueezeExciteLayer(nn.Module):
    """The scaling of an image's channels inside a graph, its weights dense.

    Args:
        scaling: The weights, the activation and the gate.
    """

    label = "squeeze_excite"

    def __init__(self, scaling: SqueezeExcite) -> None:
        super().__init__()
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        """Return x with its channels scaled; see `SqueezeExcite`."""
        return self.scaling(x)


def place_squeeze_excite(module: fx.GraphModule, plans: Mapping[str, LayerPlan]) -> tuple[int, tuple[LayerPlan, ...]]:
    """Replace each by one call; its layers stay in the model besides.

    Args:
        module: The graph, its convolutions and products placed; it is changed.
        plans: What was decided for the layers.

    Returns:
        How many there are, and plan entries for the weights that are kept besides.
    """
    count, added = 0, list[LayerPlan]()
    for node in calls(module.graph, aten.mul.Tensor):
        found = next(filter(None, (_read(module, x, s, node) for x, s in (node.args[:2], node.args[1::-1]))), None)
        if found is None:
            continue
        x, reduce, expand, gate = found
        first = _dense(reduce), _plain(reduce.bias)
        second = _dense(expand).t().contiguous(), _plain(expand.bias)
        scaling = SqueezeExcite(*first, *second, _activation(reduce), gate)
        name = f"squeeze_excite_{count}"
        module.add_submodule(name, SqueezeExciteLayer(scaling))
        with module.graph.inserting_before(node):
            new = module.graph.call_module(name, (x,))
        new.meta = {"val": node.meta["val"]}
        replace_with(node, new)
        added += [_kept_again(plans[layer.name], layer) for layer in (reduce, expand) if layer.name in plans]
        count += 1
    module.graph.eliminate_dead_code()
    module.graph.lint()
    return count, tuple(added)


Small = ConvLayer | ProductLayer


def _kept_again(plan: LayerPlan, layer: Small) -> LayerPlan:
    both = plan.bytes_before + _dense(layer).nbytes
    return replace(plan, bytes_after=both, reason=f"{plan.reason}; kept again in squeeze-and-excite")


def _dense(layer: Small) -> Tensor:
    source = layer.prepared.source()
    return dense_of(source).float().flatten(1).contiguous()


def _plain(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _activation(layer: Small) -> str:
    return layer.problem.activation if isinstance(layer, CompiledConv) else layer.problem.epilogue.activation


def _read(module: fx.GraphModule, x: Any, scale: Any, node: fx.Node) -> tuple[fx.Node, Small, Small, str] | None:
    """Return x, the two products and the gate's name; None where it is anything else, or others read a part of it."""
    image, made = value(x), value(scale)
    if len(node.args) != 2 or node.kwargs or x is scale or not is_float32(x) or not is_float32(scale):
        return None
    if image.ndim != 4 or made.ndim != 4 or not same_axes(image.shape, value(node).shape):
        return None
    if not same_axes(image.shape[:2], made.shape[:2]):
        return None
    images = image.shape[0]
    gate = _step(scale, images, last=image.shape)
    second = _step(gate.args[0], images) if gate is not None and gate.target in _GATES else None
    expand = _small(module, second)
    first = _step(second.args[0], images) if second is not None and expand is not None else None
    reduce = _small(module, first)
    mean = _step(first.args[0], images) if first is not None and reduce is not None else None
    if gate is None or expand is None or reduce is None or mean is None or not is_mean(mean, x):
        return None
    plain = (
        _activation(expand) == "none" and expand.problem.rows == image.shape[1] and _activation(reduce) in ACTIVATIONS
    )
    return (x, reduce, expand, _GATES[gate.target]) if plain else None


def _step(node: Any, images: Any, last: Sequence[Any] = ()) -> fx.Node | None:
    """Return the operator behind views of (images, channels), of `last`'s shape too; None where others read one."""
    while isinstance(node, fx.Node) and len(node.users) == 1 and is_float32(node):
        shape = value(node).shape
        flat = 2 <= len(shape) <= 4 and same_axes((shape[0], *shape[2:]), (images, *[1] * (len(shape) - 2)))
        if not flat and not (last and node.target in _VIEWS and same_axes(shape, last)):
            return None
        if node.target not in _VIEWS:
            return node
        node = node.args[0]
    return None


def _small(module: fx.GraphModule, node: fx.Node | None) -> Small | None:
    """Return the layer of a product by one weight and of nothing else."""
    if node is None or node.op != "call_module" or len(node.args) != 1:
        return None
    layer = module.get_submodule(str(node.target))
    if isinstance(layer, ConvLayer):
        return layer if layer.geometry.pointwise and layer.dimensions == 2 and not layer.residual else None
    return layer if isinstance(layer, ProductLayer) and layer.problem.epilogue.combine == "none" else None


def is_mean(node: fx.Node, x: object) -> bool:
    """Tell whether a node is the mean over the pixels of `x`."""
    if node.args[0] is not x:
        return False
    sizes: Any = argument(node, 1, "dim")
    if node.target is aten.adaptive_avg_pool2d.default:
        return all(size == 1 for size in node.args[1])  # pyright: ignore
    return node.target is aten.mean.dim and sizes is not None and sorted(axis % 4 for axis in sizes) == [2, 3]
