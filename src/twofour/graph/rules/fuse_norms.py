"""LayerNorm over the last axis, and RMSNorm as models write it out, become one call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from twofour.graph.base import Rule, argument, aten, calls, insert, is_float32, product_of, replace_with, value
from twofour.kernels.norm import norm, norm_in_place


def rewrite(module: fx.GraphModule) -> int:
    """Replace both."""
    return _layer_norms(module.graph) + _rms_norms(module.graph)


def _layer_norms(graph: fx.Graph) -> int:
    count = 0
    for node in calls(graph, aten.layer_norm.default, aten.rms_norm.default):
        centred = node.target is aten.layer_norm.default
        x, shape, weight = node.args[0], node.args[1], argument(node, 2, "weight")
        bias = argument(node, 3, "bias") if centred else None
        eps = argument(node, 4 if centred else 3, "eps", 1e-5 if centred else None)
        eps = 1.1920928955078125e-07 if eps is None else eps
        if len(shape) == 1 and all(operand is None or is_float32(operand) for operand in (x, weight, bias)):
            replace_with(node, insert(node, _place(x), (x, weight, bias, eps, centred), node))
            count += 1
    return count


def _rms_norms(graph: fx.Graph) -> int:
    """Fuse weight * (x * rsqrt(mean(x^2) + eps)), in either order of the products."""
    count = 0
    for node in calls(graph, aten.rsqrt.default):
        found = _read(node)
        if found is None:
            continue
        x, eps, scaled = found
        last, weight = _weighted(scaled)
        replace_with(last, insert(last, norm, (x, weight, None, eps, False), last))
        count += 1
    graph.eliminate_dead_code()
    return count


def _read(rsqrt: fx.Node) -> tuple[fx.Node, float, fx.Node] | None:
    """Return x, eps and the node of x * rsqrt(...)."""
    added: Any = rsqrt.args[0]
    if len(rsqrt.users) != 1 or not isinstance(added, fx.Node) or added.target is not aten.add.Tensor:
        return None
    mean, eps = added.args[:2]
    if added.kwargs or not (is_float32(added) and is_float32(mean)):  # alpha, or a sum in another precision
        return None
    if not isinstance(mean, fx.Node) or mean.target is not aten.mean.dim or not isinstance(eps, float):
        return None
    squared: Any = mean.args[0]
    axes: Any = mean.args[1]
    if not axes or list(axes) != [-1] or argument(mean, 2, "keepdim") is not True or not isinstance(squared, fx.Node):
        return None
    x = squared.args[0]
    power = squared.target is aten.pow.Tensor_Scalar and squared.args[1] == 2
    square = squared.target is aten.mul.Tensor and squared.args[1] is x
    scaled = next(iter(rsqrt.users))
    if not (power or square) or scaled.target is not aten.mul.Tensor or x not in scaled.args:
        return None
    if not all(map(is_float32, (x, squared, scaled))):
        return None
    return (x, eps, scaled) if isinstance(x, fx.Node) else None


def _weighted(scaled: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the product with a weight that follows, and the weight; else the node itself."""
    users = list(scaled.users)
    if len(users) == 1 and users[0].target is aten.mul.Tensor:
        other: Any = next((argument for argument in users[0].args if argument is not scaled), None)
        found = value(other)
        width = value(scaled).shape[-1]
        if (
            isinstance(found, Tensor)
            and other.op == "get_attr"
            and tuple(found.shape) == (width,)
            and is_float32(other)
        ):
            return users[0], other
    return scaled, None


def _place(x: Any) -> Any:
    """Return the call that may overwrite the result of a product nobody else reads, else the one that does not."""
    return norm_in_place if product_of(x) is not None and len(x.users) == 1 else norm


NORMS = Rule("normalisations fused", rewrite)
