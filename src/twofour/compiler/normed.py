"""Normalisations of a graph move into the products beside them: rows are normalised while they are in a cache."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour.compiler.fused_matmuls import ProductLayer
from twofour.errors import KernelError
from twofour.graph.base import argument, value
from twofour.kernels.base import Kernel
from twofour.kernels.fused_matmul import Factor, FusedMatmul
from twofour.kernels.norm import DTYPES, RowNorm, norm, norm_in_place, norm_to_bytes
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
        byte_range: Scale and zero point of the norm in bytes, None where nothing reads it so.
        real: Whether the norm is wanted as it is.
    """

    by_token = True

    def __init__(
        self,
        layer: ProductLayer,
        eps: float,
        centred: bool,
        keeps: bool,
        byte_range: tuple[float, int] | None = None,
        real: bool = True,
    ) -> None:
        super().__init__()
        self.layer, self.eps, self.centred, self.keeps = layer, eps, centred, keeps
        self.byte_range, self.real = byte_range, real

    @property
    def label(self) -> str:
        """Return the product's with "norm"."""
        return f"{self.layer.label}+norm"

    def forward(
        self, x: Tensor, other: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return what is wanted of epilogue(x W^T + b), its norm, and that in bytes, in this order.

        Args:
            x: float32 or bfloat16 (..., in), or uint8 of the product's static range.
            other: Second operand of the epilogue, (..., out), or None.
            weight: float32 (out,) of the norm, or None.
            bias: The same.

        Raises:
            KernelError: The operands do not fit.
        """
        found = _call(self.layer, x, other)
        if found is None:
            return self.behind(self.layer(x, other), weight, bias)
        fused, flat, other = found
        return self.of(fused, flat, other, None, (weight, bias), x.shape[:-1])

    def behind(self, y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        """Return what is wanted of a product that was computed by itself."""
        rest = weight, bias, self.eps, self.centred
        if self.byte_range is None:
            return (y, norm(y, *rest)) if self.keeps else norm_in_place(y, *rest)
        made = norm_to_bytes(y, *rest, *self.byte_range, keep=self.real, in_place=not self.keeps)
        normed = made if isinstance(made, tuple) else (made,)
        return _wanted((y, *normed) if self.keeps else normed)

    def of(
        self,
        fused: FusedMatmul,
        x: Tensor,
        other: Tensor | None,
        before: RowNorm | None,
        after: tuple[Tensor | None, ...],
        shape: Sequence[int],
    ) -> Tensor | tuple[Tensor, ...]:
        """Return what is wanted of products in one call, of rows, whose answers get `shape` but for the last axis."""
        scale, zero = self.byte_range or (1.0, 0)
        norm = RowNorm(after[0], after[1], self.eps, self.centred, scale, zero)
        size, whole = (*shape, self.layer.out_features), None
        if self.byte_range is not None:
            whole = torch.empty(len(x), self.layer.out_features, dtype=torch.uint8, device="cpu")
        try:
            y, normed = fused.run(x, other, before, norm, keep=self.keeps, whole=whole, real=self.real)
        except KernelError as error:
            raise error.for_layer(self.layer.name) from None
        wanted = (y if self.keeps else None), (normed if self.real else None), whole
        return _wanted([one.view(size) for one in wanted if one is not None])


def _wanted(found: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    return tuple(found) if len(found) > 1 else found[0]


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
    if factor is None or layer.problem.quantization.y_dtype is torch.uint8:
        return None
    x = x.resolve_neg() if x.is_neg() else x
    other = other.resolve_neg() if other is not None and other.is_neg() else other
    other = None if other is None else other.reshape(tokens, layer.out_features)
    return FusedMatmul(None, None, factor, epilogue=layer.problem.epilogue), x.reshape(tokens, layer.in_features), other


def factor_of(layer: ProductLayer, tokens: int, dtype: torch.dtype) -> Factor | None:
    """Return a product as it is served at a token count, None where no native one serves it or reads such inputs."""
    kernel, layout = layer.dispatch.at(tokens)
    quantization = layer.problem.quantization
    if not isinstance(kernel, Kernel) or kernel.native_product is None:
        return None
    if dtype not in kernel.reads and (dtype is not torch.uint8 or kernel.dtype != "int8" or quantization.dynamic):
        return None
    return Factor(kernel, layer.prepared.at(layout), layer.bias, layer.out_features, quantization)


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
        if layer.problem.quantization != DYNAMIC:
            continue  # it would read the norm in bytes
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
    x: Any = node.args[0] if _is_norm(node) or _is_norm_to_bytes(node) else None
    layer = _ours(module, x)
    return (layer, x) if layer is not None and _is_real(x, node) and combines_alike(layer, x) else (None, None)


def combines_alike(layer: ProductLayer, node: fx.Node) -> bool:
    """Tell whether the second operand of a product's epilogue, if it has one, is of the type that it answers in."""
    dtype = layer.problem.quantization.answer(value(node.args[0]).dtype)
    other = node.args[1] if len(node.args) > 1 else None
    return not isinstance(other, fx.Node) or value(other).dtype is dtype


def _is_real(x: fx.Node, normed: fx.Node) -> bool:
    """Tell whether a norm reads and answers float32, or bfloat16, beside bytes."""
    dtype, answers = getattr(value(x), "dtype", None), value(normed)
    answers = answers if isinstance(answers, tuple) else (answers,)
    return dtype in DTYPES and all(one.dtype in (dtype, torch.uint8) for one in answers)


def _is_norm_to_bytes(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is norm_to_bytes and _of_the_model(node)


def _is_norm(node: Any) -> bool:
    """Tell whether a node is a norm with the model's weights, in its input's type."""
    if not isinstance(node, fx.Node) or node.target not in (norm, norm_in_place) or len(node.args) > 5:
        return False
    return _of_the_model(node)


def _of_the_model(node: fx.Node) -> bool:
    return all(one is None or (isinstance(one, fx.Node) and one.op == "get_attr") for one in node.args[1:3])


def _ours(module: fx.GraphModule, node: Any) -> ProductLayer | None:
    """Return the product a node stands for, if a native one serves it."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    layer = module.get_submodule(str(node.target))
    return layer if isinstance(layer, ProductLayer) and native(layer) else None


def native(layer: ProductLayer) -> bool:
    """Tell whether a product that other native calls can run inside serves a layer at some token count.

    Of codes of inputs that are no bytes such calls are not told.
    """
    return layer.problem.quantization.plain and any(
        isinstance(kernel, Kernel) and kernel.native_product is not None for kernel, _ in layer.dispatch.steps
    )


def _place(module: fx.GraphModule, x: fx.Node, node: fx.Node, layer: ProductLayer) -> None:
    """Put one module in the place of a product and its norm."""
    weight, bias, eps, centred = (*node.args[1:5], True)[:4]
    given, *others = x.args
    keeps, byte_range, real = len(x.users) > 1, None, True
    if node.target is norm_to_bytes:
        byte_range = float(argument(node, 5, "scale")), int(argument(node, 6, "zero"))
        real = argument(node, 8, "keep", True)
    both = byte_range is not None and real
    name = f"{x.target}_normed"
    module.add_submodule(name, NormedProduct(layer, float(eps), bool(centred), keeps, byte_range, real))  # pyright: ignore[reportArgumentType]
    for constant in (weight, bias):
        if isinstance(constant, fx.Node):
            x.prepend(constant)
    # What stands for the answers now, in their order, and their values: parts of a norm with its bytes are nodes.
    parts = [[user for user in node.users if user.args[1] == i] for i in range(2)] if both else [[node]]
    answers = value(node) if both else (value(node),)
    olds, made = [*([[x]] if keeps else []), *parts], (*((value(x),) if keeps else ()), *answers)
    with module.graph.inserting_before(x):
        new = module.graph.call_module(name, (given, others[0] if others else None, weight, bias))
        several = len(olds) > 1
        outputs = (
            [module.graph.call_function(operator.getitem, (new, i)) for i in range(len(olds))] if several else [new]
        )
    new.meta = {"val": made if several else made[0]}
    for output, old, answer in reversed(list(zip(outputs, olds, made, strict=True))):
        output.meta = {"val": answer}
        for one in old:
            if one is not x:  # its norm reads it until that is gone
                one.replace_all_uses_with(output)
                module.graph.erase_node(one)
    _end(module, node, x, outputs[0] if keeps else None)


def _end(module: fx.GraphModule, node: fx.Node, x: fx.Node, instead: fx.Node | None) -> None:
    """Erase a norm, where its parts alone were, and its product, which others may read."""
    if node in module.graph.nodes:
        module.graph.erase_node(node)
    if instead is not None:
        x.replace_all_uses_with(instead)
    module.graph.erase_node(x)
