"""A convolution kept whole, the batch normalisation, residual sum and activation after it: one call."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, fx

from twofour.capture import KEPT
from twofour.graph.base import (
    ACTIVATION_CALLS,
    Rule,
    activation_name,
    argument,
    aten,
    calls,
    insert,
    is_float32,
    replace_with,
    same_size,
    value,
)

_CLIPS = (aten.hardtanh.default, aten.hardtanh_.default, aten.relu6.default)
"""What ReLU6 is captured as."""


@dataclass(frozen=True)
class Norm:
    """A batch normalisation in evaluation mode: attributes of the graph's module, None where there is none."""

    weight: str | None
    bias: str | None
    mean: str
    variance: str
    eps: float


@dataclass(frozen=True)
class Convolution:
    """activation(norm(conv(x)) + other): x is the node's first argument, `other` its second where it has one.

    Attributes:
        layer: Name of the layer that was kept whole.
        norm: The normalisation, to be folded into the weight.
        activation: A key of `conv.ACTIVATIONS`.
        residual: Whether there is an `other`.
        pad: Zeros that stood around the image in a call of their own: left, right, above, below.
    """

    layer: str
    norm: Norm | None = None
    activation: str = "none"
    residual: bool = False
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)


def convolution(x: Tensor, other: Tensor | None = None) -> Tensor:
    """Mark a convolution in a graph; `meta["convolution"]` says which. It is replaced before running."""
    raise AssertionError(f"a convolution that was not replaced: x {tuple(x.shape)}, other {other is not None}")


def convolution_of(node: Any) -> Convolution | None:
    """Return the convolution a node stands for."""
    return node.meta.get("convolution") if isinstance(node, fx.Node) else None


def rewrite(module: fx.GraphModule, *, fold: bool = True) -> int:
    """Replace them; returns how many operators were taken into a convolution; `fold`: normalisations too."""
    for node in [node for node in calls(module.graph, KEPT) if node.args[3]]:  # a Linear has no axes
        new = insert(node, convolution, node.args[:1], node, convolution=Convolution(str(node.args[1])))
        replace_with(node, new)
    return (
        _pads(module.graph) + (_norms(module.graph) if fold else 0) + _sums(module.graph) + _activations(module.graph)
    )


def _pads(graph: fx.Graph) -> int:
    """Let a convolution pad what was padded for it alone, which kernels that leave out taps outside do for nothing."""
    count = 0
    for node in calls(graph, aten.pad.default, aten.constant_pad_nd.default):
        sizes, fill = node.args[1], argument(node, 3 if node.target is aten.pad.default else 2, "value")
        zeros = argument(node, 2, "mode", "constant") == "constant" if node.target is aten.pad.default else True
        image = value(node).ndim == 4 and len(sizes) == 4 and all(isinstance(size, int) and size >= 0 for size in sizes)
        if not (zeros and image and not fill and all(convolution_of(user) for user in node.users)):
            continue
        for user in list(node.users):
            found = convolution_of(user)
            assert found is not None
            user.meta["convolution"] = replace(found, pad=tuple(sizes))
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
        count += 1
    return count


def _norms(graph: fx.Graph) -> int:
    count = 0
    for node in calls(graph, aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default):
        source, found = node.args[0], convolution_of(node.args[0])
        whole = node.target is aten.batch_norm.default
        answers = [node] if whole else [user for user in node.users if user.target is operator.getitem]
        fits = found is not None and found == Convolution(found.layer, pad=found.pad) and len(source.users) == 1
        if not fits or len(answers) != 1 or (not whole and answers[0].args[1] != 0):
            continue
        if whole and argument(node, 5, "training"):
            continue
        norm = _norm(node, argument(node, 7 if whole else 6, "eps"))
        if norm is not None and found is not None:
            _fuse(answers[0], source, source.args, replace(found, norm=norm))
            count += 1
    return count


def _norm(node: fx.Node, eps: Any) -> Norm | None:
    weight, bias, mean, variance = node.args[1:5]
    for part in (weight, bias, mean, variance):
        if part is not None and (not isinstance(part, fx.Node) or part.op != "get_attr"):
            return None
    if not isinstance(mean, fx.Node) or not isinstance(variance, fx.Node):
        return None
    names = [str(part.target) if isinstance(part, fx.Node) else None for part in (weight, bias)]
    return Norm(names[0], names[1], str(mean.target), str(variance.target), float(eps))


def _sums(graph: fx.Graph) -> int:
    order = {node: index for index, node in enumerate(graph.nodes)}
    count = 0
    for node in calls(graph, aten.add.Tensor, aten.add_.Tensor):
        if len(node.args) != 2 or node.kwargs or not is_float32(node):
            continue
        fitting = [
            (order.get(a, 0), a, b) for a, b in (node.args, node.args[::-1]) if _open(a) and _operand(a, b, node)
        ]
        if fitting:
            _, source, other = max(fitting, key=lambda entry: entry[0])
            found = convolution_of(source)
            assert found is not None
            order[_fuse(node, source, (source.args[0], other), replace(found, residual=True))] = order[node]
            count += 1
    return count


def _activations(graph: fx.Graph) -> int:
    count = 0
    for node in calls(graph, *ACTIVATION_CALLS, *_CLIPS):
        source, name = node.args[0], _activation(node)
        found = convolution_of(source)
        if found is not None and name is not None and found.activation == "none" and len(source.users) == 1:
            _fuse(node, source, source.args, replace(found, activation=name))
            count += 1
    return count


def _activation(node: fx.Node) -> str | None:
    """Return which of `conv.ACTIVATIONS` a call is; None of a clip to other numbers than ReLU6's."""
    if node.target not in _CLIPS:
        return activation_name(node)
    ends = argument(node, 1, "min_val", -1.0), argument(node, 2, "max_val", 1.0)
    return "relu6" if node.target is aten.relu6.default or ends == (0.0, 6.0) else None


def _open(node: Any) -> bool:
    """Tell whether a sum may go into the convolution."""
    found = convolution_of(node)
    return found is not None and found.activation == "none" and not found.residual and len(node.users) == 1


def _operand(source: fx.Node, other: Any, node: fx.Node) -> bool:
    return source is not other and is_float32(other) and same_size(source, other) and same_size(source, node)


def _fuse(node: fx.Node, source: fx.Node, args: tuple[Any, ...], fused: Convolution) -> fx.Node:
    new = insert(node, convolution, args, node, convolution=fused)
    replace_with(node, new)
    for dead in (node.args[0] if node.op == "call_function" and node.target is operator.getitem else None, source):
        if isinstance(dead, fx.Node) and not dead.users:
            node.graph.erase_node(dead)
    return new


CONVOLUTIONS = Rule("what follows a convolution into it", rewrite)
UNFOLDED = Rule(CONVOLUTIONS.name, partial(rewrite, fold=False))
"""The same but for normalisations, whose folding makes another weight."""
