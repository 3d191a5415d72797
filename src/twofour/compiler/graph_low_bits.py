"""Layers of low bits in a graph: convolutions in a row become one layer that hands codes from one to the next.

Between two convolutions stand normalisation, ReLU, clipping and a 2 x 2 pool, and the rounding of the second one's
inputs. All of it is monotone in a sum of whole numbers, in floats too, so that thresholds stand for it. They are found
by running these very operators: the codes are those of the model, to the bit.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour import quantization
from twofour.capture import KEPT
from twofour.compiler.codes import Codes
from twofour.compiler.graph_bits_linear import Handed, place_bits_linears
from twofour.compiler.low_bits import LinearOfCodes
from twofour.compiler.low_bits_after import Behind, behind, held_by, pools
from twofour.compiler.low_bits_conv import ConvOfCodes
from twofour.compiler.replaceable import no_kernel
from twofour.compiler.thresholds import Apply, Sums
from twofour.errors import KernelError
from twofour.graph.base import argument, aten, calls, insert, place, replace_with
from twofour.kernels.bits_matmul.conv import Requantised
from twofour.kernels.conv import Geometry

_log = logging.getLogger("twofour.compiler")

CODES = "convolutions hand codes on"
"""What the plan calls the rewrite."""


class BitsConvChain(nn.Module):
    """Convolutions of low bits in a row, codes between them, the last answer real; one native call each.

    Args:
        name: Of the first layer.
        links: The convolutions, the first one first.
        adds: Whether something is added to the last one's answer.
    """

    def __init__(self, name: str, links: Sequence[ConvOfCodes], *, adds: bool = False) -> None:
        super().__init__()
        self.name, self.links, self.adds = name, tuple(links), adds

    @property
    def label(self) -> str:
        """Return how the account names it."""
        after, convs = self.links[-1].problem.after, ", ".join(["conv of bits"] * len(self.links))
        more = {" + batch_norm": after.affine is not None, " + add": self.adds, " + relu": after.relu}
        more |= {" + max_pool": after.pool == 2, " + mean": after.pool > 0}
        return convs + "".join(name for name, there in more.items() if there)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Return the last convolution's answer: float32 (images, out, height, width), channels last; or of one image.

        Args:
            x: Images, or one image.
            other: Added to the answer, where the last convolution's call takes a sum over.

        Raises:
            KernelError: The input does not fit.
        """
        if x.ndim == 3:
            return self.forward(x[None], None if other is None else other[None])[0]
        problem, size = self.links[0].problem, x.shape[2:]
        try:
            for index, link in enumerate(self.links):
                added = other if index == len(self.links) - 1 else None
                x = link.row.run(x, link.prepared, link.bias, problem, added)
                if (answer := link.problem.answer) is not None:
                    size = link.problem.geometry.output(*size)
                    coded = answer.images(*size)
                    problem, size = replace(self.links[index + 1].problem, coded=coded), (coded.height, coded.width)
        except KernelError as error:
            raise error.for_layer(self.name) from None
        return x


def kept_low_bits(fast: nn.Module, *, floats: bool = False) -> dict[str, nn.Module]:
    """Return the layers of low bits that run on kernels, which are single nodes of a graph.

    With `floats` also those that kernels take and floats serve faster here: the graph of a file may have them as nodes.
    """
    found = {name: (low, fast.get_submodule(name)) for name, low in quantization.of(fast).items()}
    return {
        name: layer
        for name, (low, layer) in found.items()
        if low.runs is not None or (floats and not no_kernel(low, layer))
    }


def widths_and_kernels(fast: nn.Module) -> list[str]:
    """Return, of each layer of low bits, all that its time in a graph follows from beside its sizes."""
    found = []
    for low in quantization.of(fast).values():
        traits = low.widths.name, low.static, low.group, low.shifted, low.per_tensor
        found.append(repr((*traits, low.runs.product.dispatch_text if isinstance(low.runs, Codes) else "floats")))
    return found


def axes_of(module: nn.Module) -> tuple[int, ...]:
    """Return what `capture` wants to know of a layer: outputs, then of a convolution four numbers an axis."""
    if not isinstance(module, nn.Conv2d):
        assert isinstance(module, nn.Linear)
        return (module.out_features,)
    g = Geometry.of(module)
    axes = [(g.kernel[i], g.stride[i], g.before[i] + g.after[i], g.dilation[i]) for i in range(2)]
    return g.out_channels, *(size for axis in axes for size in axis)


def place_low_bits(module: fx.GraphModule, fast: nn.Module, *, hand_on: bool = True) -> tuple[int, Handed]:
    """Let each layer of low bits run on its kernel, convolutions in a row as one.

    Args:
        module: The graph as captured; it is changed.
        fast: The model with compiled layers.
        hand_on: Whether layers may hand codes on; without, each stands alone.

    Returns:
        How many convolutions hand codes on, and which Linears do.
    """
    _whole_norms(module.graph)
    linears: dict[fx.Node, LinearOfCodes] = {}
    for index, node in enumerate(calls(module.graph, KEPT)):
        layer = fast.get_submodule(str(node.args[1]))
        low = quantization.held_by(layer)
        if isinstance(product := _product(layer), LinearOfCodes):
            linears[node] = product
        elif low is not None and low.runs is None:  # in the graph of a file; here floats are faster
            _place(module, node, node.args[:1], f"bits_floats_{index}", layer)
    handed = place_bits_linears(module, linears, hand_on=hand_on)
    links = {node: found for node in calls(module.graph, KEPT) if (found := _low_bits(fast, node)) is not None}
    nodes = list(links)
    before: dict[fx.Node, tuple[fx.Node, Requantised]] = {}  # by the convolution that reads the codes
    for node in nodes if hand_on else ():
        if (found := _handed_on(module, fast, node)) is not None:
            before[found[0]] = node, found[1]
    for source, answer in before.values():
        links[source] = replace(links[source], problem=replace(links[source].problem, answer=answer), bias=None)
    sources = {source for source, _ in before.values()}
    for index, last in enumerate(node for node in nodes if node not in sources):
        run = [last]
        while run[0] in before:
            run.insert(0, before[run[0]][0])
        found = behind(module, last) if hand_on else None
        _place_chain(module, run, [links[one] for one in run], found, f"bits_conv_{index}")
    module.graph.eliminate_dead_code()
    module.graph.lint()
    return len(before), handed


def _place(module: fx.GraphModule, node: fx.Node, args: tuple[Any, ...], name: str, layer: nn.Module) -> None:
    node.args = args
    place(module, node, name, layer)


def _whole_norms(graph: fx.Graph) -> None:
    """Let normalisations that a capture took apart, as where a model writes in place, be one call each again."""
    for node in calls(graph, aten._native_batch_norm_legit_no_training.default):
        answers = list(node.users)
        if len(answers) == 1 and answers[0].target is operator.getitem and answers[0].args[1] == 0:
            momentum, eps = node.args[5:]
            args = (*node.args[:5], False, momentum, eps, False)
            replace_with(answers[0], insert(node, aten.batch_norm.default, args, answers[0]))
            graph.erase_node(node)


def _place_chain(
    module: fx.GraphModule, run: Sequence[fx.Node], links: list[ConvOfCodes], found: Behind | None, name: str
) -> None:
    """Let one call stand for convolutions in a row and what it takes over behind the last one."""
    args, first = run[0].args[:1], str(run[0].args[1])
    if found is None:
        return _place(module, run[-1], args, name, BitsConvChain(first, links))
    *within, end = found.nodes
    links[-1] = replace(links[-1], problem=replace(links[-1].problem, after=found.after))
    args = args if found.other is None else (*args, found.other)
    end.kwargs = {}
    _place(module, end, args, name, BitsConvChain(first, links, adds=found.other is not None))
    for node in reversed(within):
        module.graph.erase_node(node)


def _low_bits(fast: nn.Module, node: Any) -> ConvOfCodes | None:
    """Return what a kept convolution runs on, where it is one of low bits."""
    if not isinstance(node, fx.Node) or node.target is not KEPT or not node.args[3]:
        return None
    product = _product(fast.get_submodule(str(node.args[1])))
    return product if isinstance(product, ConvOfCodes) else None


def _product(layer: nn.Module) -> object:
    """Return what a layer of low bits runs on for what it holds now, None where floats serve."""
    low = quantization.held_by(layer)
    return low.runs.following(layer) if low is not None and isinstance(low.runs, Codes) else None


def _handed_on(module: fx.GraphModule, fast: nn.Module, node: Any) -> tuple[fx.Node, Requantised] | None:
    """Return the one convolution that reads a convolution's answer and the thresholds of what stands between, if so."""
    applied: list[Apply] = []
    pool, at = 1, node
    while len(at.users) == 1:
        at = next(iter(at.users))
        reader = _low_bits(fast, at)
        if reader is not None:
            answer = _thresholds(node, fast, reader, applied, pool)
            return None if answer is None else (at, answer)
        if pools(at) and pool == 1:
            pool = 2
        elif (apply := _monotone(module, at, pooled=pool > 1)) is not None:
            applied.append(apply)
        else:
            return None
    return None


def _monotone(module: fx.GraphModule, node: fx.Node, *, pooled: bool) -> Apply | None:
    """Return a node's operator on its first argument where it keeps or turns the order of a channel's numbers.

    A normalisation may turn all of a channel around, which does not commute with a pool before it.
    """
    if node.target in (aten.relu.default, aten.relu_.default):
        return torch.relu
    if node.target in (aten.hardtanh.default, aten.hardtanh_.default):
        low, high = argument(node, 1, "min_val", -1.0), argument(node, 2, "max_val", 1.0)
        return lambda x: torch.clamp(x, low, high)
    if node.target is aten.batch_norm.default and not pooled and not argument(node, 5, "training"):
        weight, bias, mean, variance = (held_by(module, part) for part in node.args[1:5])
        momentum, eps = argument(node, 6, "momentum"), argument(node, 7, "eps")
        if isinstance(mean, Tensor) and isinstance(variance, Tensor):
            return lambda x: torch.batch_norm(x, weight, bias, mean, variance, False, momentum, eps, False)
    return None


def _thresholds(
    node: fx.Node, fast: nn.Module, reader: ConvOfCodes, applied: Sequence[Apply], pool: int
) -> Requantised | None:
    """Return how a convolution's sums become the codes of the next one, None where the kernels do not do it."""
    codes = _low_bits(fast, node)
    assert codes is not None
    sums = Sums(codes.problem, codes.restored(), codes.bias, applied, reader.problem.quantization)
    found = None if sums.unfit else sums.thresholds(reader.row.planes, pool)
    if found is None:
        why = sums.unfit or "what stands between answers NaN, or turns back within a channel"
        _log.info("%s hands no codes to %s: %s", codes.name, reader.name, why)
    return found
