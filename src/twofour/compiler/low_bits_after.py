"""What stands behind a convolution of low bits whose answer is real: a normalisation, a sum, a ReLU, in its own call.

The answer stays that of torch's operators to the bit: a batch normalisation is one multiply-add for each number, by a
scale and a shift that torch's own operator is asked for, and where it answers otherwise on probes it stays a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from twofour.capture import changes_in_place
from twofour.compiler.squeeze import is_mean
from twofour.compiler.thresholds import PROBES
from twofour.graph.base import argument, aten, is_float32, named_argument, same_size, value
from twofour.kernels.bits_matmul.conv import AfterConv
from twofour.kernels.problem import MaybeTensor


@dataclass(frozen=True)
class Behind:
    """What one call of a convolution takes over.

    Attributes:
        nodes: From the convolution's reader to the last one, in order.
        after: What they compute.
        other: What is added; None: nothing.
    """

    nodes: tuple[fx.Node, ...]
    after: AfterConv
    other: fx.Node | None


def behind(module: fx.GraphModule, conv: fx.Node) -> Behind | None:
    """Return what a convolution's call takes over, None where nothing stands behind it that it can.

    Args:
        module: The graph's.
        conv: The convolution; its answer is real.
    """
    affine: MaybeTensor = None
    other: fx.Node | None = None
    relu, at = False, conv
    nodes: list[fx.Node] = []
    while len(at.users) == 1 and not relu:
        node = next(iter(at.users))
        if not is_float32(node):
            break
        if affine is None and other is None and (scaled := normalisation(module, node, at)) is not None:
            affine = scaled
        elif other is None and (found := combined(node, at)) is not None and found[0] == "add":
            other = found[1]
        elif node.target in (aten.relu.default, aten.relu_.default):
            relu = True
        else:
            break
        nodes.append(node)
        at = node
    pool = _mean(at, nodes)
    fits = nodes and movable(module, conv, nodes)
    return Behind(tuple(nodes), AfterConv(affine, relu, pool), other) if fits else None


def _mean(at: fx.Node, nodes: list[fx.Node]) -> int:
    """Add the mean over pixels behind `at`, a 2 x 2 pool before it too, to what a call takes over; `AfterConv.pool`."""
    found = [*at.users] if len(at.users) == 1 else []
    if found and pools(found[0]):
        found += found[0].users
    image = value(found[-1]) if len(found) in (1, 2) else None
    whole = image is not None and image.ndim == 4 and isinstance(image.shape[1], int) and image.shape[1] % 64 == 0
    if whole and is_mean(found[-1], found[-1].args[0]) and is_float32(found[-1]):  # torch adds whole vectors so
        nodes += found
        return len(found)
    return 0


def pools(node: fx.Node) -> bool:
    """Tell whether a node takes the greatest of every 2 x 2 pixels."""
    if node.target is not aten.max_pool2d.default:
        return False
    names = "kernel_size", "stride", "padding", "dilation", "ceil_mode"
    kernel, stride, padding, dilation, ceil = (named_argument(node, name) for name in names)
    return _all(kernel, 2) and _all(stride or kernel, 2) and _all(padding, 0) and _all(dilation, 1) and not ceil


def _all(sizes: Any, size: int) -> bool:
    return all(one == size for one in (sizes if isinstance(sizes, list | tuple) else [sizes]))


def movable(module: fx.GraphModule, first: fx.Node, nodes: list[fx.Node]) -> bool:
    """Tell whether nothing writes into a tensor between a layer and the last of `nodes`, which its call moves to."""
    order = list(module.graph.nodes)
    between = order[order.index(first) : order.index(nodes[-1])] if nodes else []
    return not any(changes_in_place(node) for node in between if node.op == "call_function" and node not in nodes)


_COMBINED: dict[Any, str] = {
    aten.add.Tensor: "add",
    aten.add_.Tensor: "add",
    aten.mul.Tensor: "multiply",
    aten.mul_.Tensor: "multiply",
}


def combined(node: fx.Node, at: fx.Node) -> tuple[str, fx.Node] | None:
    """Return how a node combines `at` with a tensor of its size, a key of `epilogue.COMBINES`, and that tensor."""
    if node.target not in _COMBINED or len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    other = b if a is at else a
    if node.target in (aten.add_.Tensor, aten.mul_.Tensor) and a is not at:
        return None  # it writes into the other one
    if not isinstance(other, fx.Node) or other is at or not is_float32(other):
        return None
    return (_COMBINED[node.target], other) if same_size(other, at) and same_size(node, at) else None


def normalisation(module: fx.GraphModule, node: fx.Node, at: fx.Node) -> Tensor | None:
    """Return scale and shift of a batch normalisation of `at`, images or tokens: float32 (2, channels)."""
    if node.target is not aten.batch_norm.default or node.args[0] is not at or argument(node, 5, "training"):
        return None
    weight, bias, mean, variance = (held_by(module, part) for part in node.args[1:5])
    affine = all(one is None or isinstance(one, Tensor) for one in (weight, bias))
    axes = value(at).ndim
    if not affine or not isinstance(mean, Tensor) or not isinstance(variance, Tensor) or axes not in (2, 4):
        return None
    eps = float(argument(node, 7, "eps"))

    def normed(x: Tensor, weight: MaybeTensor, bias: MaybeTensor, mean: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)

    of_channels = (1, len(mean), 1, 1)[:axes]
    zeros = torch.zeros_like(mean)
    scale = normed(torch.ones_like(mean).view(of_channels), weight, None, zeros)  # 1 * scale + 0
    shift = normed(zeros.view(of_channels), weight, bias, mean)
    generator = torch.Generator().manual_seed(0)
    size = (1, len(mean), PROBES, 1) if axes == 4 else (PROBES, len(mean))
    spread = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
    probes = spread * (variance.detach() + eps).sqrt().view(of_channels) + mean.detach().view(of_channels)
    probes = probes.contiguous(memory_format=torch.channels_last) if axes == 4 else probes
    want = (probes.double() * scale.double() + shift.double()).float()  # the product is exact, the sum rounds once more
    if not torch.equal(normed(probes, weight, bias, mean), want):
        return None
    return torch.stack([scale.flatten(), shift.flatten()])


def held_by(module: fx.GraphModule, part: Any) -> Any:
    """Return the tensor that an argument reads from the graph's module, or the argument itself."""
    return attrgetter(str(part.target))(module) if isinstance(part, fx.Node) and part.op == "get_attr" else part
