"""Normalisations of a graph move into the products beside them: rows are normalised while they are in a cache."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour.compiler.fused_matmuls import ProductLayer
from twofour.errors import KernelError
from twofour.graph.base import value
from twofour.kernels.base import Kernel
from twofour.kernels.fused_matmul import Factor, FusedMatmul
from twofour.kernels.norm import DTYPES, RowNorm, norm, norm_in_place
from twofour.kernels.quantization import DYNAMIC

NORMED, OF_NORMED = "normalisations into products", "products of normalised rows"
"""What the plan calls the rewrites: a norm behind a product, and before one."""


class NormedProduct(nn.Module):
    """A product of a graph and the normalisation of its rows; one native call where its kernel is one.

    Args:
        layer: The product.
        eps: Added to the variance.
        centred: True for LayerNorm; False for RMSNorm.
        keeps: Whether the product itself is wanted too.
    """

    by_token = True

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
            x: float32 or bfloat16 (..., in).
            other: Second operand of the epilogue, (..., out), or None.
            weight: float32 (out,) of the norm, or None.
            bias: The same.

        Raises:
            KernelError: The operands do not fit.
        """
        after = RowNorm(weight, bias, self.eps, self.centred)
        found = _call(self.layer, x, other)
        if found is None:
            y = self.layer(x, other)
            return (
                (y, norm(y, weight, bias, self.eps, self.centred))
                if self.keeps
                else norm_in_place(y, weight, bias, self.eps, self.centred)
            )
        fused, flat, other = found
        try:
            y, normed = fused.run(flat, other, None, after, keep=self.keeps)
        except KernelError as error:
            raise error.for_layer(self.layer.name) from None
        shape = (*x.shape[:-1], self.layer.out_features)
        return (y.view(shape), normed.view(shape)) if self.keeps else normed.view(shape)


class ProductOfNormed(nn.Module):
    """A product of a graph that normalises the rows it reads; one native call where its kernel is one.

    Args:
        layer: The product.
        eps: Added to the variance.
        centred: True for LayerNorm; False for RMSNorm.
    """

    by_token = True

    def __init__(self, layer: ProductLayer, eps: float, centred: bool) -> None:
        super().__init__()
        self.layer, self.eps, self.centred = layer, eps, centred

    @property
    def label(self) -> str:
        """Return "norm" with the product's."""
        return f"norm+{self.layer.label}"

    def forward(self, x: Tensor, other: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return epilogue(norm(x) W^T + b).

        Args:
            x: float32 or bfloat16 (..., in).
            other: Second operand of the epilogue, (..., out), or None.
            weight: float32 (in,) of the norm, or None.
            bias: The same.

        Raises:
            KernelError: The operands do not fit.
        """
        found = _call(self.layer, x, other)
        if found is None:
            normed = norm(x, weight, bias, self.eps, self.centred)
            return self.layer(normed) if other is None else self.layer(normed, other)
        fused, flat, other = found
        try:
            y, _ = fused.run(flat, other, RowNorm(weight, bias, self.eps, self.centred))
        except KernelError as error:
            raise error.for_layer(self.layer.name) from None
        return y.view(*x.shape[:-1], self.layer.out_features)


def _call(layer: ProductLayer, x: Tensor, other: Tensor | None) -> tuple[FusedMatmul, Tensor, Tensor | None] | None:
    """Return the native call that serves an input, with its operands as rows; None where there is none."""
    tokens = prod(x.shape[:-1])
    factor = factor_of(layer, tokens, x.dtype)
    if factor is None:
        return None
    x = x.resolve_neg() if x.is_neg() else x
    other = other.resolve_neg() if other is not None and other.is_neg() else other
    other = None if other is None else other.reshape(tokens, layer.out_features)
    return FusedMatmul(None, None, factor, epilogue=layer.problem.epilogue), x.reshape(tokens, layer.in_features), other


def factor_of(layer: ProductLayer, tokens: int, dtype: torch.dtype) -> Factor | None:
    """Return a product as it is served at a token count, None where no native one serves it or reads such inputs."""
    kernel, layout = layer.dispatch.at(tokens)
    if not isinstance(kernel, Kernel) or kernel.native_product is None or dtype not in kernel.reads:
        return None
    return Factor(kernel, layer.prepared.at(layout), layer.bias, layer.out_features)


def norms_into_products(module: fx.GraphModule) -> int:
    """Let native products normalise their rows; returns how many do."""
    count = 0
    for node in list(module.graph.nodes):
        layer, x = _product_before(module, node)
        if layer is not None:
            _place(module, x, node, layer)
            count += 1
    module.graph.lint()
    return count


def norms_before_products(module: fx.GraphModule) -> int:
    """Let native products normalise the rows they alone read; returns how many do."""
    count = 0
    for node in list(module.graph.nodes):
        normed: Any = node.args[0] if node.op == "call_module" else None
        layer = _ours(module, node)
        if layer is None or not _is_norm(normed) or len(normed.users) > 1 or not _is_real(normed.args[0], normed):
            continue
        if list(node.args).count(normed) > 1:
            continue  # it is the epilogue's operand too
        x, weight, bias, eps, centred = (*normed.args, True)[:5]
        name = f"{node.target}_of_normed"
        module.add_submodule(name, ProductOfNormed(layer, float(eps), bool(centred)))
        other = node.args[1] if len(node.args) > 1 else None
        with module.graph.inserting_before(node):
            new = module.graph.call_module(name, (x, other, weight, bias))
        new.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
        module.graph.erase_node(normed)
        count += 1
    module.graph.lint()
    return count


def _product_before(module: fx.GraphModule, node: fx.Node) -> tuple[ProductLayer | None, Any]:
    x: Any = node.args[0] if _is_norm(node) else None
    layer = _ours(module, x)
    return (layer, x) if layer is not None and _is_real(x, node) else (None, None)


def _is_real(x: fx.Node, normed: fx.Node) -> bool:
    """Tell whether a norm reads and answers float32, or bfloat16."""
    dtype = getattr(value(x), "dtype", None)
    return dtype in DTYPES and value(normed).dtype is dtype


def _is_norm(node: Any) -> bool:
    """Tell whether a node is a norm with the model's weights, in its input's type."""
    if not isinstance(node, fx.Node) or node.target not in (norm, norm_in_place) or len(node.args) > 5:
        return False
    return all(one is None or (isinstance(one, fx.Node) and one.op == "get_attr") for one in node.args[1:3])


def _ours(module: fx.GraphModule, node: Any) -> ProductLayer | None:
    """Return the product a node stands for, if a native one serves it."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    layer = module.get_submodule(str(node.target))
    return layer if isinstance(layer, ProductLayer) and native(layer) else None


def native(layer: ProductLayer) -> bool:
    """Tell whether a product that other native calls can run inside serves a layer at some token count.

    A range of the input that was measured is not among what such calls are told.
    """
    return layer.problem.quantization == DYNAMIC and any(
        isinstance(kernel, Kernel) and kernel.native_product is not None for kernel, _ in layer.dispatch.steps
    )


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
