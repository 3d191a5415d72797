"""Attention of an int8 graph on bytes: the product of queries, keys and values writes them, by ranges of data.

A product's answer is rounded with one scale. What is wanted here is one for each column, so the scales and the biases
of its rows are divided by them: the answer itself is then a whole number around 128. Each column of the keys is taken
about its middle, which changes no softmax. A column of queries and that of keys which it is multiplied with share what
their ranges need, since one unit of the sums has to count for all columns of a head.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from twofour.compiler.attention_int8 import (
    LEAST,
    MORE,
    MOST_OFF,
    OPTIONS,
    AttentionChoice,
    judged,
    off_by_heads,
)
from twofour.compiler.fused_matmuls import ProductLayer
from twofour.compiler.layer import CompiledLinear, PreparedWeights
from twofour.errors import TwofourError
from twofour.graph import Program
from twofour.graph.base import argument, calls, constant, value
from twofour.kernels.attention import attention_of_columns
from twofour.kernels.attention.cpu import MOST_BYTE_KEYS
from twofour.kernels.base import Kernel
from twofour.measure.distance import distance
from twofour.packing import Packed, dense_of

logger = logging.getLogger("twofour.compiler")

LEAST_SHARE = 1e-3
"""Part of a head's widest column that the range of any column has at least: those that are all but constant."""

LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class Ranged:
    """How queries, keys and values stand in bytes: real = (byte - 128) * step + middle, by columns.

    Attributes:
        units: What a unit of the scores of each head is in units of ln 2: float32 (heads,).
        steps: Of queries, keys and values, float32 (columns,) each.
        middles: Likewise; those of queries are 0, those of keys what no softmax shows.
    """

    units: Tensor
    steps: tuple[Tensor, Tensor, Tensor]
    middles: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, width: int, scale: float) -> Ranged:
        """Return the bytes of answers between these ends.

        Args:
            q: float32 (2, heads * width), the least and the greatest of each column.
            k: (2, key heads * width).
            v: (2, columns).
            width: Columns of a head of q and k.
            scale: Factor of the scores, positive.
        """
        most = q.abs().amax(0).view(k.shape[1] // width, -1, width)  # (key heads, heads of each, width)
        wide, half = (_at_least(t) for t in (most.amax(1), (k[1] / 2 - k[0] / 2).view(-1, width)))
        both = (wide * half).amax(-1, keepdim=True) / 127**2  # the step of a query times that of a key
        own = (both * wide / half).sqrt()
        units = (both * scale * LOG2_E).expand(-1, most.shape[1]).flatten()
        steps = own[:, None].expand(most.shape).flatten(), (both / own).flatten()
        return cls(
            units.contiguous(),
            (*steps, (v[1] / 2 - v[0] / 2).clamp(min=torch.finfo(torch.float32).eps) / 127),
            (torch.zeros_like(steps[0]), k[0] / 2 + k[1] / 2, v[0] / 2 + v[1] / 2),
        )

    @property
    def constants(self) -> Tensor:
        """What attention is told of them."""
        return torch.cat([self.units, self.steps[2], self.middles[2]])

    def rounded(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Return queries, keys and values (.., columns) in bytes."""
        ends = zip(operands, self.steps, self.middles, strict=True)
        return [(((t.float() - m) / s).round() + 128).clamp(0, 255).to(torch.uint8) for t, s, m in ends]


def _at_least(ranges: Tensor) -> Tensor:
    """Return ranges (heads, width), none of them far below the head's widest."""
    widest = ranges.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
    return torch.maximum(ranges, LEAST_SHARE * widest)


def hand_bytes_to_attention(
    module: fx.GraphModule,
    layers: Mapping[str, CompiledLinear],
    leaves: Sequence[Any],
    exact: Callable[[], Sequence[Any]],
    choice: AttentionChoice,
) -> AttentionChoice:
    """Let products write bytes for the attention that computes in int8, if the answer on the example is as near then.

    Args:
        module: The rewritten graph, attention in int8 chosen; it is changed.
        layers: The compiled layers by name; those whose answers are not read as bytes forget their ranges.
        leaves: The example.
        exact: Returns what the layers answer on exact activations.
        choice: What became of attention in int8.

    Returns:
        The same with what became of this.
    """
    found = {node: case for node in calls(module.graph, attention_of_columns) if (case := _case(module, layers, node))}
    off = judged(module, found, leaves, lambda node: _off(found[node])) if found else {}
    cases = [case for node, case in found.items() if off[node] <= MOST_OFF]
    limits, used = choice.limits, set[str]()
    if cases:
        want = exact()
        before = distance(Program(module)(*leaves), want)
        for index, case in enumerate(cases):
            case.place(module, index)
        after = distance(Program(module)(*leaves), want)
        part = "" if len(cases) == choice.count else f" of {len(cases)} calls"
        if after <= MORE * before + LEAST:
            worst = max(off[case.node] for case in cases)
            used = {name for case in cases for layer in case.products.values() for name in layer.sources}
            limits = (
                f"queries, keys and values{part} are bytes by ranges of the data, of every length: {after:.1e} from "
                f"exact activations then, {before:.1e} without, a head's answers off by up to {worst:.1e}"
            )
            limits += f"; the others {choice.limits}" if part else ""
        else:
            for case in cases:
                case.undo(module)
            limits += f"; queries, keys and values stay bfloat16: in bytes {after:.1e} from exact, {before:.1e} without"
    for name, layer in layers.items():
        layer.answers = layer.answers if name in used else None
    return replace(choice, limits=limits)


@dataclass
class _Case:
    """A call of attention, the products that alone feed it, and its bytes."""

    node: fx.Node
    products: dict[fx.Node, ProductLayer]
    changed: dict[fx.Node, ProductLayer]
    ranged: Ranged

    def place(self, module: fx.GraphModule, index: int) -> None:
        """Put products of bytes in the places of the others."""
        node, name = self.node, f"attention_steps_{index}"
        steps = constant(module, node, name, self.ranged.constants, self.ranged.constants)
        for product, layer in self.changed.items():
            module.add_submodule(str(product.target), layer)
            product.meta["val"] = value(product).to(torch.uint8)
        node.args = (*node.args, steps)

    def undo(self, module: fx.GraphModule) -> None:
        """Put the products back."""
        for product, layer in self.products.items():
            module.add_submodule(str(product.target), layer)
            product.meta["val"] = value(product).to(torch.bfloat16)
        *args, steps = self.node.args
        self.node.args = tuple(args)
        module.graph.erase_node(steps)  # pyright: ignore[reportArgumentType]


def _case(module: fx.GraphModule, layers: Mapping[str, CompiledLinear], node: Any) -> _Case | None:
    """Return what may become of a call of attention, None where it stays as it is."""
    kept = argument(node, 12, "int8")
    if not isinstance(kept, tuple) or kept[1] > MOST_BYTE_KEYS:
        return None
    begins, sizes, width = node.args[3:6]
    found = {operand: _product(module, layers, operand, node) for operand in node.args[:3]}
    products = {operand: layer for operand, layer in found.items() if layer is not None}
    scale = argument(node, 7, "scale")
    scale = width**-0.5 if scale is None else scale
    if len(products) < len(found) or not scale > 0:
        return None
    known = {operand: _ends(layers, layer) for operand, layer in products.items()}
    ends = {operand: one for operand, one in known.items() if one is not None}
    columns = [
        (operand, begin, begin + size) for operand, begin, size in zip(node.args[:3], begins, sizes, strict=True)
    ]
    if any(
        layer.out_features != sum(e - b for o, b, e in columns if o is operand) for operand, layer in products.items()
    ):
        return None  # columns that nobody reads, or several do
    if any(a is c and max(b, d) < min(e, f) for (a, b, e), (c, d, f) in pairwise([*columns, columns[0]])):
        return None
    if len(ends) < len(known):
        return None
    q, k, v = (ends[operand][:, begin:end] for operand, begin, end in columns)
    ranged = Ranged.of(q, k, v, width, scale)
    try:
        changed = {operand: _in_bytes(layer, operand, columns, ranged) for operand, layer in products.items()}
    except TwofourError as error:  # scales that a layout cannot hold
        logger.info("the operands of attention stay bfloat16: %s", error)
        return None
    return _Case(node, products, changed, ranged)


def _product(
    module: fx.GraphModule, layers: Mapping[str, CompiledLinear], operand: fx.Node, reader: fx.Node
) -> ProductLayer | None:
    """Return the product that makes an operand for attention alone, on native kernels and by a static range."""
    if operand.op != "call_module" or list(operand.users) != [reader] or len(operand.args) != 1:
        return None
    layer = module.get_submodule(str(operand.target))
    if not isinstance(layer, ProductLayer) or not layer.problem.epilogue.plain or not layer.sources:
        return None
    ours = all(isinstance(kernel, Kernel) and kernel.native_product is not None for kernel, _ in layer.dispatch.steps)
    static = not layer.problem.quantization.dynamic and layer.problem.quantization.plain
    return layer if ours and static and all(name in layers for name in layer.sources) else None


def _ends(layers: Mapping[str, CompiledLinear], product: ProductLayer) -> Tensor | None:
    """Return the ranges of a product's answers (2, out), None where they are not known."""
    found = [(layers[name].answers, layers[name].out_features) for name in product.sources]
    if any(ends is None or ends.shape != (2, rows) for ends, rows in found):
        return None
    return torch.cat([ends for ends, _ in found if ends is not None], 1)


def _in_bytes(
    layer: ProductLayer, operand: fx.Node, columns: Sequence[tuple[fx.Node, int, int]], ranged: Ranged
) -> ProductLayer:
    """Return a product that answers in bytes around 128."""
    step = torch.ones(layer.out_features, dtype=torch.float32, device="cpu")
    middle = torch.zeros_like(step)
    for (source, begin, end), steps, middles in zip(columns, ranged.steps, ranged.middles, strict=True):
        if source is operand:
            step[begin:end], middle[begin:end] = steps, middles
    prepared = PreparedWeights(weight.again(_divided(weight.stored(), step)) for weight in layer.prepared.weights)
    bias = torch.zeros_like(step) if layer.bias is None else layer.bias.detach()
    quantization = replace(layer.problem.quantization, y_dtype=torch.uint8, y_scale=1.0, y_zero=128)
    problem = replace(layer.problem, quantization=quantization)
    made = ProductLayer(layer.name, layer.in_features, problem, layer.dispatch, prepared, (bias - middle) / step)
    made.sources, made.tokens, made.divided = layer.sources, layer.tokens, True
    return made


def _divided(weight: Packed | Tensor, step: Tensor) -> Packed | Tensor:
    """Return a weight whose rows are divided, its whole numbers the same."""
    if isinstance(weight, Packed) and weight.scales is not None and weight.zeros is None:
        return replace(weight, scales=weight.scales / step[:, None])
    return dense_of(weight) / step[:, None]


def _off(case: _Case) -> Callable[..., float]:
    """Return what tells how far a call of this case is off in bytes, of the worst head of the worst sequence."""

    def off(q: Tensor, k: Tensor, v: Tensor, begins: Any, sizes: Any, width: int, *rest: Any, **named: Any) -> float:
        q, k, v = (t[..., begin : begin + size] for t, begin, size in zip((q, k, v), begins, sizes, strict=True))
        mask, scale, causal, unseen = (*rest, *list(OPTIONS.values())[len(rest) :])[:4]
        given = (0, 0, 0), sizes, width, mask, scale, causal, unseen
        want = attention_of_columns(q, k, v, *given)
        q, k, v = case.ranged.rounded((q, k, v))
        got = attention_of_columns(q, k, v, *given, steps=case.ranged.constants)
        return off_by_heads(want, got, width)

    return off
