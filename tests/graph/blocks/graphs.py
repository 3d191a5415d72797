"""Graphs made by hand, a call at a time, and what they compute before and after their operators are blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour.graph import Program
from twofour.graph.base import aten
from twofour.graph.blocks import Always, Blocks, Times, fuse_blocks

_NAMES = ("neg", "abs", "tanh", "sigmoid", "sin", "cos", "relu", "erf", "gelu", "silu")
CALM = [getattr(aten, name).default for name in _NAMES]
"""Operators of one tensor whose numbers stay small."""


class Grown:
    """A graph under construction; each node's value is there, as tracing would give its sizes."""

    def __init__(self) -> None:
        self.graph, self.inputs = fx.Graph(), []

    def input(self, tensor: Tensor) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        node.meta["val"] = tensor
        self.inputs.append(tensor)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        given = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
        node.meta["val"] = target(*given[0], **given[1])
        return node

    def module(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule(nn.Module(), self.graph)


def fused(module: fx.GraphModule, times: Times | None = None) -> tuple[Blocks, Program, Program]:
    """Return what became of a graph, its program before and its program after."""
    before = Program(module)
    blocks = fuse_blocks(module, times or Always())
    return blocks, before, Program(module)


def assert_same(before: Program, after: Program, inputs: Sequence[Tensor], tolerance: float = 1e-5) -> None:
    """Both answer alike: values, types, sizes and strides."""
    for got, want in zip(after(*inputs), before(*inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
        sizes = [index for index, size in enumerate(want.shape) if size != 1]
        assert [got.stride(index) for index in sizes] == [want.stride(index) for index in sizes]


def single(target: Any, inputs: Sequence[Tensor], *args: Any, place: Callable[..., Any] | None = None, **kwargs: Any):
    """Return a block of an operator and a negation behind it, and what torch computes."""
    grown = Grown()
    nodes = [grown.input(tensor) for tensor in inputs]
    answer = grown.call(target, *nodes, *args, **kwargs) if place is None else place(grown, nodes)
    kind = answer.meta["val"].dtype
    last = grown.call(aten.logical_not.default if kind is torch.bool else aten.neg.default, answer)
    return fused(grown.module(answer, last))


def grown(seed: int) -> tuple[fx.GraphModule, list[Tensor]]:
    """A random graph of 10 to 60 operators: broadcasts, reductions, views, several readers and outputs, products."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    batch, length, width = choice.choice((1, 2, 3)), choice.choice((1, 4, 5)), choice.choice((2, 8, 17))
    shapes = [(batch, length, width), (length, width), (width,), (batch, length, 1), (1, 1, 1), ()]
    made = Grown()
    nodes = [made.input(torch.randn(shape)) for shape in shapes[: choice.randint(1, 6)]]
    weight = made.input(torch.randn(width, width) / width)
    for _ in range(choice.randint(10, 60)):
        nodes.append(_step(made, choice, nodes, weight))
    last = [node for node in nodes if not node.users] + choice.sample(nodes, 2)
    return made.module(*dict.fromkeys(last)), made.inputs


def _step(made: Grown, choice: random.Random, nodes: list[fx.Node], weight: fx.Node) -> fx.Node:
    x = choice.choice(nodes[-12:])
    shape = x.meta["val"].shape
    kind = choice.random()
    if kind < 0.3:
        return made.call(choice.choice(CALM), x)
    if kind < 0.6:
        y = choice.choice(nodes)
        if _broadcast(shape, y.meta["val"].shape):
            target = choice.choice((aten.add.Tensor, aten.sub.Tensor, aten.maximum.default, aten.minimum.default))
            return made.call(aten.mul.Tensor, made.call(target, x, y), 0.5)
    if kind < 0.7 and shape:
        target = choice.choice((aten.mean.dim, aten.amax.default, aten.amin.default))
        return made.call(target, x, [choice.choice((-1, -1, -1, 0))], choice.random() < 0.7)
    if kind < 0.75 and shape:
        return made.call(aten.softmax.int, x, -1)
    if kind < 0.8:
        return (
            made.call(aten.unsqueeze.default, x, choice.choice((-1, 0))) if len(shape) < 3 else _view(made, choice, x)
        )
    if kind < 0.85:
        rising = made.call(aten.gt.Scalar, x, 0.0)
        return made.call(aten.where.self, rising, x, made.call(aten.mul.Tensor, x, 0.25))
    if kind < 0.9 and shape and shape[-1] == weight.meta["val"].shape[0]:
        return made.call(aten.matmul.default, x, weight)
    return made.call(choice.choice((aten.add.Tensor, aten.mul.Tensor, aten.clamp.default)), x, choice.uniform(-1, 1))


def _view(made: Grown, choice: random.Random, x: fx.Node) -> fx.Node:
    shape = list(x.meta["val"].shape)
    kind = choice.randrange(5)
    if kind == 0:
        return made.call(aten.reshape.default, x, [-1, shape[-1]])
    if kind == 3:
        return made.call(aten.transpose.int, x, choice.choice((0, 1)), 2)
    if kind == 4:
        turned = made.call(aten.cat.default, [made.call(aten.neg.default, x), x], -1)
        return made.call(
            aten.slice.Tensor,
            made.call(aten.tanh.default, turned),
            2,
            *choice.choice(((0, shape[-1]), (shape[-1], 999), (1, 2))),
        )
    if kind == 1:
        return made.call(aten.permute.default, x, [1, 0, 2])
    return made.call(aten.slice.Tensor, x, -1, 0, max(1, shape[-1] // 2))


def _broadcast(a: Sequence[int], b: Sequence[int]) -> bool:
    try:
        return len(torch.broadcast_shapes(a, b)) <= 3
    except RuntimeError:
        return False
