"""Normalisations of a graph move into the products before them: rows are normalised while they are in a cache."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

from torch import Tensor, fx, nn

from twofour.compiler.fused_matmuls import ProductLayer
from twofour.errors import KernelError
from twofour.graph.base import is_float32
from twofour.kernels.dense_matmul import Float32Matmul
from twofour.kernels.norm import RowNorm, norm, norm_in_place

NORMED = "normalisations into products"
"""What the plan calls the rewrite."""


class NormedProduct(nn.Module):
    """A product of a graph and the normalisation of its rows; one native call where its kernel is ours.

    Args:
        layer: The product.
        eps: Added to the variance.
        centred: True for LayerNorm; False for RMSNorm.
        keeps: Whether the product itself is wanted too.
    """

    def __init__(self, layer: ProductLayer, eps: float, centred: bool, keeps: bool) -> None:
        super().__init__()
        self.layer, self.eps, self.centred, self.keeps = layer, eps, centred, keeps

    @property
    def label(self) -> str:
        """Return the product's with "norm"."""
        return f"{self.layer.label}+norm"

    def forward(
        self, x: Tensor, other: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of epilogue(x W^T + b), or both.

        Args:
            x: float32 (..., in).
            other: Second operand of the epilogue, (..., out), or None.
            weight: float32 (out,) of the norm, or None.
            bias: The same.

        Raises:
            KernelError: The operands do not fit.
        """
        layer = self.layer
        tokens = prod(x.shape[:-1])
        kernel, layout = layer.dispatch.at(tokens)
        if not isinstance(kernel, Float32Matmul):
            y = layer(x, other)
            return (
                (y, norm(y, weight, bias, self.eps, self.centred))
                if self.keeps
                else norm_in_place(y, weight, bias, self.eps, self.centred)
            )
        x = x.resolve_neg() if x.is_neg() else x
        other = other.resolve_neg() if other is not None and other.is_neg() else other
        flat = x.reshape(tokens, layer.in_features)
        other = None if other is None else other.reshape(tokens, layer.out_features)
        after = RowNorm(weight, bias, self.eps, self.centred)
        try:
            y, normed = kernel.run_normed(
                flat, layer.prepared.weights[layout], layer.bias, layer.problem, other, after, keep=self.keeps
            )
        except KernelError as error:
            raise error.for_layer(layer.name) from None
        shape = *x.shape[:-1], layer.out_features
        return (y.view(shape), normed.view(shape)) if self.keeps else normed.view(shape)


def norms_into_products(module: fx.GraphModule) -> int:
    """Let products whose kernel is ours normalise their rows; returns how many do."""
    count = 0
    for node in list(module.graph.nodes):
        layer, x = _product_before(module, node)
        if layer is not None:
            _place(module, x, node, layer)
            count += 1
    module.graph.lint()
    return count


def _product_before(module: fx.GraphModule, node: fx.Node) -> tuple[ProductLayer | None, Any]:
    if node.op != "call_function" or node.target not in (norm, norm_in_place) or len(node.args) > 5:
        return None, None
    arguments: tuple[Any, ...] = node.args
    x, *operands = arguments[:3]
    constant = all(one is None or (isinstance(one, fx.Node) and one.op == "get_attr") for one in operands)
    if not isinstance(x, fx.Node) or x.op != "call_module" or not constant or not is_float32(x):
        return None, None
    layer = module.get_submodule(str(x.target))
    ours = isinstance(layer, ProductLayer) and any(
        isinstance(kernel, Float32Matmul) for kernel, _ in layer.dispatch.steps
    )
    return (layer, x) if isinstance(layer, ProductLayer) and ours else (None, None)


def _place(module: fx.GraphModule, x: fx.Node, node: fx.Node, layer: ProductLayer) -> None:
    """Put one module in the place of a product and its norm."""
    weight, bias, eps, centred = (*node.args[1:5], True)[:4]
    given, *others = x.args  # pyright: ignore
    keeps = len(x.users) > 1
    name = f"{x.target}_normed"
    module.add_submodule(name, NormedProduct(layer, float(eps), bool(centred), keeps))  # pyright: ignore[reportArgumentType]
    for constant in (weight, bias):
        if isinstance(constant, fx.Node):
            x.prepend(constant)
    operand = others[0] if others else None
    with module.graph.inserting_before(x):
        new = module.graph.call_module(name, (given, operand, weight, bias))
        outputs = [module.graph.call_function(operator.getitem, (new, i)) for i in range(2)] if keeps else [new]
    new.meta = {"val": (x.meta["val"], node.meta["val"]) if keeps else node.meta["val"]}
    for output, old in zip(outputs[::-1], (node, x), strict=False):
        if keeps:
            output.meta = {"val": old.meta["val"]}
        old.replace_all_uses_with(output)
        module.graph.erase_node(old)
    if not keeps:
        module.graph.erase_node(x)
