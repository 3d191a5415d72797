"""Convolutions in a row become one call where it takes at most 1.05 of their time: by strips of rows, or one by one.

A residual bottleneck (1x1, 3x3, 1x1, sum) and an inverted residual (1x1, depthwise, 1x1) write between their
convolutions what only the next one reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour.compiler.graph_conv import ConvLayer
from twofour.errors import KernelError
from twofour.graph import Executor, Program
from twofour.graph.base import is_float32, value
from twofour.kernels import find
from twofour.kernels.conv import ConvKernel, Images, PreparedConv, channels_last
from twofour.kernels.conv_chain import ConvChain, Link
from twofour.kernels.conv_operator import to_numbers
from twofour.measure.cache import Cache
from twofour.measure.chooser import race

IN_A_CHAIN = "convolutions in a row in one call"
"""What the plan calls the rewrite."""

LONGEST = 3
"""Convolutions of a chain, at most: what a bottleneck has."""

TIE = 1.05
"""How many times as long as the separate calls one call may take: it is fewer calls and bytes, and a smaller difference
is the noise of a busy machine."""

APART, WHOLE, STRIPS = "apart", "one call", "one call by strips"
"""What a chain is timed as."""

SECONDS, ROUNDS = 0.1, 7
"""Time box and rounds of one race."""


class ConvChainLayer(nn.Module):
    """Convolutions of a graph of which one alone reads what another writes; one native call.

    Args:
        layers: The convolutions, the first one first.
        by_strips: Whether the call goes by strips of rows.
    """

    def __init__(self, layers: Sequence[ConvLayer], by_strips: bool) -> None:
        super().__init__()
        self.layers, self.by_strips = nn.ModuleList(layers), by_strips
        self.chain = ConvChain(tuple(map(_link, layers)))

    @property
    def label(self) -> str:
        """Return its convolutions with what is done in their passes, such as "conv+relu, conv+add+relu"."""
        return ", ".join(layer.label for layer in self._layers())

    def forward(self, x: Tensor, *others: Tensor | None) -> Tensor:
        """Return the last convolution's answer.

        Args:
            x: float32 (images, in, height, width).
            others: For each convolution what is added before its activation, of its answer's shape, or None.

        Raises:
            KernelError: The operands do not fit.
        """
        layers = self._layers()
        try:
            images: Images = (x.shape[0], x.shape[2], x.shape[3])
            if self.chain.refuses(images) is None:
                added = [None if other is None else other.resolve_neg() for other in others]
                return self.chain.run(x.resolve_neg(), added, self.chain.strip_rows(images) if self.by_strips else None)
        except KernelError as error:
            raise error.for_layer(layers[0].name) from None
        for layer, other in zip(layers, others, strict=True):
            x = layer(x, other)
        return x

    def _layers(self) -> list[ConvLayer]:
        return [layer for layer in self.layers if isinstance(layer, ConvLayer)]


def _link(layer: ConvLayer) -> Link:
    weight = layer.prepared.weights[0]
    assert isinstance(weight, PreparedConv), layer.name
    return Link(find(layer.dispatch.names[0], ConvKernel), weight, layer.bias, layer.problem)


def convolutions_in_a_row(module: fx.GraphModule, cache: Cache) -> tuple[int, tuple[str, ...]]:
    """Let one call stand for convolutions in a row where it takes at most 1.05 of their time.

    Args:
        module: The graph, its convolutions placed; it is changed.
        cache: Times measured earlier on this machine.

    Returns:
        How many calls there are, and why others are none.
    """
    count, why = 0, list[str]()
    for run in _runs(module):
        at = 0
        while at + 1 < len(run):
            for length in range(min(LONGEST, len(run) - at), 1, -1):
                nodes = run[at : at + length]
                times = _times(module, nodes, cache)
                best = min((WHOLE, STRIPS), key=times.__getitem__)
                if times[best] <= TIE * times[APART]:
                    _place(module, nodes, ConvChainLayer(_layers(module, nodes), best == STRIPS), f"conv_chain_{count}")
                    count, at = count + 1, at + length
                    break
            else:
                why.append(_why(module, nodes, times))
                at += 1
    module.graph.lint()
    return count, tuple(why)


def _why(module: fx.GraphModule, nodes: Sequence[fx.Node], times: dict[str, float]) -> str:
    names = " and ".join(f"`{layer.name}`" for layer in _layers(module, nodes))
    best = min(times[WHOLE], times[STRIPS])
    return f"{IN_A_CHAIN}: {names} take {best * 1e3:.3f} ms in one call, {times[APART] * 1e3:.3f} ms apart"


def _layers(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[ConvLayer]:
    layers = [module.get_submodule(str(node.target)) for node in nodes]
    return [layer for layer in layers if isinstance(layer, ConvLayer)]


def _runs(module: fx.GraphModule) -> list[list[fx.Node]]:
    """Return the convolutions in a row, two or more, in the graph's order."""
    runs: dict[fx.Node, list[fx.Node]] = {}  # by the last of them
    for node in module.graph.nodes:
        if _fits(module, node):
            source: Any = node.args[0]
            alone = source in runs and len(source.users) == 1 and list(node.args).count(source) == 1
            run = runs.pop(source) if alone else []
            runs[node] = [*run, node]
    return [run for run in runs.values() if len(run) > 1]


def _fits(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node is a convolution of images that a chain can run."""
    layer = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    if not isinstance(layer, ConvLayer) or layer.dimensions != 2 or min(layer.images) < 1 or not is_float32(node):
        return False
    link = _link(layer)
    depthwise = link.kernel.operation == "depthwise_conv" and len(node.args) > 1
    if depthwise or link.kernel.native_convolution is None or link.kernel.unavailable() is not None:
        return False
    return value(node).ndim == 4 and ConvChain((link,)).refuses(layer.images) is None


def _times(module: fx.GraphModule, nodes: Sequence[fx.Node], cache: Cache) -> dict[str, float]:
    layers = _layers(module, nodes)
    facts = [
        (
            to_numbers(layer.geometry),
            layer.dispatch.names,
            layer.problem.activation,
            layer.bias is not None,
            len(node.args),
        )
        for node, layer in zip(nodes, layers, strict=True)
    ]
    case = hashlib.sha256(repr((facts, layers[0].images)).encode()).hexdigest()[:16]
    return cache.times(cache.key(f"conv_chain/{case}"), (APART, WHOLE, STRIPS), lambda: _race(nodes, layers))


def _race(nodes: Sequence[fx.Node], layers: Sequence[ConvLayer]) -> tuple[dict[str, float], float]:
    """Race the calls as a graph makes them: native, what is between the separate ones in planned memory."""
    draw = torch.Generator().manual_seed(0)
    chain = ConvChain(tuple(map(_link, layers)))
    sizes, channels = chain.sizes(layers[0].images), [layer.geometry.out_channels for layer in layers]

    def image(channels: int, size: Images) -> Tensor:
        count, *sides = size
        drawn = torch.randn((count, channels, *sides), generator=draw, dtype=torch.float32, device="cpu")
        return channels_last(drawn)

    inputs = [image(layers[0].geometry.in_channels, sizes[0])]
    added = [len(node.args) > 1 for node in nodes]
    inputs += [image(c, size) for c, size, more in zip(channels, sizes[1:], added, strict=True) if more]
    with torch.inference_mode():
        calls: dict[str, Any] = {}
        for name in (APART, WHOLE, STRIPS):
            program = Executor(Program(_alone(layers, added, name)))
            program.prepare(inputs)
            calls[name] = lambda program=program: program(*inputs)
        return race(calls, repeats=ROUNDS, seconds=SECONDS)


def _alone(layers: Sequence[ConvLayer], added: Sequence[bool], name: str) -> fx.GraphModule:
    """Return a graph of these convolutions and nothing else: one call, or a call each."""
    graph, root = fx.Graph(), nn.Module()
    at = graph.placeholder("x")
    others = [graph.placeholder(f"other_{i}") if more else None for i, more in enumerate(added)]
    if name == APART:
        for i, (layer, other) in enumerate(zip(layers, others, strict=True)):
            root.add_module(f"conv_{i}", layer)
            at = graph.call_module(f"conv_{i}", (at,) if other is None else (at, other))
    else:
        root.add_module("chain", ConvChainLayer(layers, name == STRIPS))
        at = graph.call_module("chain", (at, *others))
    graph.output((at,))
    return fx.GraphModule(root, graph)


def _place(module: fx.GraphModule, nodes: Sequence[fx.Node], layer: ConvChainLayer, name: str) -> None:
    """Put the layer in the place of its convolutions."""
    module.add_submodule(name, layer)
    first, last = nodes[0], nodes[-1]
    others = [node.args[1] if len(node.args) > 1 else None for node in nodes]
    with module.graph.inserting_before(last):
        new = module.graph.call_module(name, (first.args[0], *others))
    new.meta = {"val": last.meta["val"]}
    last.replace_all_uses_with(new)
    for node in reversed(nodes):
        module.graph.erase_node(node)
