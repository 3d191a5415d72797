"""Two products in a row become one call, by strips of tokens: what is between them never exists whole.

The MLP of a transformer writes between its products what is up to four times as wide as its input. By strips that stays
in a cache. On a Zen 4 the call takes 0.86 to 1.04 of the time of its products one by one, dense or 2:4 (figures in
kernels/fused_matmul/README.md), of static ranges in int8 the same to 0.95, so that fewer calls and bytes decide, and
nothing is measured.
"""

from __future__ import annotations

from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from twofour.compiler.fused_matmuls import ProductLayer
from twofour.compiler.normed import NormedProduct, ProductOfNormed, combines_alike, factor_of, native
from twofour.errors import KernelError
from twofour.graph.base import value
from twofour.kernels.fused_matmul import FusedMatmul
from twofour.kernels.norm import DTYPES, RowNorm

IN_A_ROW = "products in a row by strips"
"""What the plan calls the rewrite."""

First: TypeAlias = ProductLayer | ProductOfNormed
Last: TypeAlias = ProductLayer | NormedProduct


class MlpLayer(nn.Module):
    """Products of a graph of which one alone reads what the others write; one native call where their kernels are.

    Args:
        first: The first product, with its activation; it may normalise what it reads.
        gate: The product of the same input that the first one's answer is multiplied with, or None.
        last: The product of that; it may be followed by its normalisation.
    """

    by_token = True

    def __init__(self, first: First, gate: ProductLayer | None, last: Last) -> None:
        super().__init__()
        self.first, self.gate, self.last = first, gate, last

    @property
    def label(self) -> str:
        """Return "mlp" between what stands before and after: "norm+mlp+gelu+add"."""
        last = self.last.label.removeprefix("linear")
        return self.first.label.replace("linear", "mlp") + last

    def forward(
        self, x: Tensor, other: Tensor | None, before: tuple[Tensor | None, ...], after: tuple[Tensor | None, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        """Return what `last` does: the last product's answer, its norm, that in bytes.

        Args:
            x: float32 or bfloat16 (..., in), or uint8 of the first product's static range.
            other: Second operand of the last product's epilogue, (..., out), or None.
            before: Weight and bias, each (in,) or None, of the norm before; () without one.
            after: The same, (out,), of the norm behind.

        Raises:
            KernelError: The operands do not fit.
        """
        tokens = prod(x.shape[:-1])
        fused = self._native(tokens, x.dtype)
        if fused is None or x.is_neg() or (other is not None and other.is_neg()):
            return self._apart(x, other, before, after)
        first, last = _product(self.first), _product(self.last)
        flat = x.reshape(tokens, first.in_features)
        other = None if other is None else other.reshape(tokens, last.out_features)
        ahead = (
            RowNorm(before[0], before[1], self.first.eps, self.first.centred)
            if isinstance(self.first, ProductOfNormed)
            else None
        )
        if isinstance(self.last, NormedProduct):
            return self.last.of(fused, flat, other, ahead, after, x.shape[:-1])
        try:
            y, _ = fused.run(flat, other, ahead)
        except KernelError as error:
            raise error.for_layer(first.name) from None
        return y.view(*x.shape[:-1], last.out_features)

    def _native(self, tokens: int, dtype: torch.dtype) -> FusedMatmul | None:
        """Return the call at a token count, None where no native product serves a part, or reads such inputs."""
        first, gate = (
            None if one is None else factor_of(_product(one), tokens, dtype) for one in (self.first, self.gate)
        )
        if first is None or (gate is None) is not (self.gate is None):
            return None
        last = factor_of(_product(self.last), tokens, first.quantization.answer(dtype))
        if last is None:
            return None
        activation, epilogue = _product(self.first).problem.epilogue.activation, _product(self.last).problem.epilogue
        return FusedMatmul(first, gate, last, activation, epilogue)

    def _apart(
        self, x: Tensor, other: Tensor | None, before: tuple[Tensor | None, ...], after: tuple[Tensor | None, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute one product after the other."""
        if isinstance(self.first, ProductOfNormed):
            between = self.first(x, None, *before)
        else:
            between = self.first(x) if self.gate is None else self.first(x, self.gate(x))
        if isinstance(self.last, NormedProduct):
            return self.last(between, other, *after)
        return self.last(between) if other is None else self.last(between, other)


def _product(layer: First | Last) -> ProductLayer:
    return layer if isinstance(layer, ProductLayer) else layer.layer


def products_in_a_row(module: fx.GraphModule) -> int:
    """Let one call stand for products that only one other reads; returns how many there are.

    Args:
        module: The graph, its norms in its products; it is changed.
    """
    count = 0
    for node in list(module.graph.nodes):
        found = _read(module, node)
        if found is not None:
            _place(module, node, *found, f"mlp_{count}")
            count += 1
    module.graph.lint()
    return count


def _read(module: fx.GraphModule, node: fx.Node) -> tuple[MlpLayer, fx.Node, fx.Node | None] | None:
    """Return the layer for a product and those it reads, the first of them and the gate; None where there is none."""
    last, source = _layer(module, node, ProductLayer, NormedProduct), node.args[0] if node.args else None
    first = _layer(module, source, ProductLayer, ProductOfNormed)
    if last is None or first is None or not isinstance(source, fx.Node) or len(source.users) > 1:
        return None
    if list(node.args).count(source) > 1 or _product(last).problem.epilogue.activation != "none":
        return None
    if not _alike(_product(last), node, source):
        return None
    combine = _product(first).problem.epilogue.combine
    if combine == "none":
        return MlpLayer(first, None, last), source, None
    gate: Any = source.args[1]
    layer: Any = _layer(module, gate, ProductLayer)
    if combine != "multiply" or layer is None or not isinstance(first, ProductLayer):
        return None
    alone = len(gate.users) == 1 and len(gate.args) == 1 and gate.args[0] is source.args[0]
    fits = layer.problem.epilogue.plain and layer.out_features == first.out_features
    fits = (
        fits
        and value(gate).dtype is value(source).dtype
        and first.problem.quantization.codes[:3] == layer.problem.quantization.codes[:3]
    )
    return (MlpLayer(first, layer, last), source, gate) if alone and fits else None


def _alike(last: ProductLayer, node: fx.Node, first: fx.Node) -> bool:
    """Tell whether the last of two products answers in real numbers, of the type of what they read that is real."""
    quantization = last.problem.quantization
    answer = quantization.answer(value(first).dtype)
    given = value(first.args[0]).dtype
    return answer in DTYPES and given in (answer, torch.uint8) and combines_alike(last, node)


def _layer(module: fx.GraphModule, node: Any, *kinds: type[nn.Module]) -> Any:
    """Return the layer of a node that is one of `kinds`, of rows of one dtype, and may run on a native product."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    layer: Any = module.get_submodule(str(node.target))
    if type(layer) not in kinds or not native(_product(layer)):
        return None
    given, made = value(node.args[0]), value(node)
    tensors = made if isinstance(made, tuple) else (made,)
    types = {one.dtype for one in (given, *tensors) if isinstance(one, Tensor)} - {torch.uint8}
    return layer if types <= set(DTYPES) and len(types) <= 1 else None


def _place(
    module: fx.GraphModule, node: fx.Node, layer: MlpLayer, source: fx.Node, gate: fx.Node | None, name: str
) -> None:
    """Put the layer in the place of its products."""
    module.add_submodule(name, layer)
    other = node.args[1] if len(node.args) > 1 else None
    before = tuple(source.args[2:]) if isinstance(layer.first, ProductOfNormed) else ()
    after = tuple(node.args[2:]) if isinstance(layer.last, NormedProduct) else ()
    with module.graph.inserting_before(node):
        new = module.graph.call_module(name, (source.args[0], other, before, after))
    new.meta = {"val": node.meta["val"]}
    node.replace_all_uses_with(new)
    for old in (node, source, gate):
        if old is not None:
            module.graph.erase_node(old)
