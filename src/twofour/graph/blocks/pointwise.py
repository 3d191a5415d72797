"""Element-wise operators of torch as steps of a fused block.

Arithmetic is float32 and rounds where a value is stored: between operators of bfloat16 nothing is lost, so that a block
is at least as exact as the operators one by one. A conversion to bfloat16 that the model asks for does round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload

from twofour.graph.base import aten
from twofour.kernels.fused_block import Expression, Value

Operands: TypeAlias = Mapping[str, Any]
"""Arguments by the schema's names: tensors as values, the rest as they are; "node" is the node."""

Lowering: TypeAlias = Callable[[Expression, Operands], Value | None]
"""Returns what an operator computes, None where its arguments ask for something else than steps."""


def operands(node: fx.Node, of: Callable[[fx.Node], Value]) -> dict[str, Any]:
    """Return a call's arguments by name, defaults included, tensors as what `of` says."""
    target = node.target
    assert isinstance(target, OpOverload), target
    given: dict[str, Any] = {"node": node}
    for index, argument in enumerate(target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        found: Any = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name, default)
        given[argument.name] = of(found) if isinstance(found, fx.Node) else found
    return given


def _one(step: str) -> Lowering:
    return lambda e, o: e.apply(step, o["self"])


def _two(step: str, scale: str = "") -> Lowering:
    """A step of two operands; `scale`: the argument that the second is multiplied with."""

    def lower(e: Expression, o: Operands) -> Value | None:
        second = o["other"]
        if o.get("rounding_mode") is not None or (scale and isinstance(o[scale], Value)):
            return None
        if scale and o[scale] != 1:
            second = e.apply("mul", second, o[scale]) if isinstance(second, Value) else second * o[scale]
        return e.apply(step, o["self"], second)

    return lower


def _rsub(e: Expression, o: Operands) -> Value | None:
    return e.apply("rsub", o["self"], o["other"]) if o["alpha"] == 1 else None


def _power(e: Expression, o: Operands) -> Value:
    x, n = o["self"], o["exponent"]
    if isinstance(n, Value) or isinstance(x, int | float):
        return e.apply("pow", x, n)
    named = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if n in named:
        return e.apply(named[n], x)
    if n in (1, 3, 4, -2):
        square = e.apply("square", x)
        whole = {1: lambda: x, 3: lambda: e.apply("mul", square, x), 4: lambda: e.apply("square", square)}
        return whole[n]() if n in whole else e.apply("reciprocal", square)
    return e.apply("pow", x, n)


def _between(low: str, high: str, least: float | None = None, most: float | None = None) -> Lowering:
    """Clamped between two arguments of these names, or these numbers."""

    def lower(e: Expression, o: Operands) -> Value | None:
        x = o["self"]
        for step, name, number in (("maximum", low, least), ("minimum", high, most)):
            limit = o.get(name, number)
            x = x if limit is None else e.apply(step, x, limit)
        return x

    return lower


def _gelu(e: Expression, o: Operands) -> Value:
    return e.apply("gelu_tanh" if o["approximate"] == "tanh" else "gelu", o["self"])


def _leaky(e: Expression, o: Operands) -> Value:
    x = o["self"]
    return e.apply("where", e.apply("gt", x, 0.0), x, e.apply("mul", x, o["negative_slope"]))


def _elu(e: Expression, o: Operands) -> Value:
    x, scale = o["self"], o["scale"]
    below = e.apply("mul", e.apply("expm1", e.apply("mul", x, o["input_scale"])), o["alpha"] * scale)
    return e.apply("where", e.apply("gt", x, 0.0), e.apply("mul", x, scale), below)


def _softplus(e: Expression, o: Operands) -> Value:
    x, beta = o["self"], o["beta"]
    scaled = e.apply("mul", x, beta)
    soft = e.apply("div", e.apply("log1p", e.apply("exp", scaled)), beta)
    return e.apply("where", e.apply("gt", scaled, o["threshold"]), x, soft)


def _hard_sigmoid(e: Expression, x: Value) -> Value:
    return e.apply("div", e.apply("minimum", e.apply("maximum", e.apply("add", x, 3.0), 0.0), 6.0), 6.0)


def _where(e: Expression, o: Operands) -> Value | None:
    return e.apply("where", o["condition"], o["self"], o["other"])


def _masked_fill(e: Expression, o: Operands) -> Value:
    return e.apply("where", o["mask"], o["value"], o["self"])


def _scaled(e: Expression, x: Value, number: Any) -> Value:
    return x if number == 1 else e.apply("mul", x, number)


def _addcmul(e: Expression, o: Operands) -> Value:
    return e.apply("add", o["self"], _scaled(e, e.apply("mul", o["tensor1"], o["tensor2"]), o["value"]))


def _addcdiv(e: Expression, o: Operands) -> Value:
    return e.apply("add", o["self"], _scaled(e, e.apply("div", o["tensor1"], o["tensor2"]), o["value"]))


def _lerp(e: Expression, o: Operands) -> Value:
    """As torch: from the nearer end."""
    a, b, weight = o["self"], o["end"], o["weight"]
    apart = e.apply("sub", b, a)
    near = e.apply("add", a, e.apply("mul", apart, weight))
    if not isinstance(weight, Value):
        return near if abs(weight) < 0.5 else e.apply("sub", b, e.apply("mul", apart, 1 - weight))
    far = e.apply("sub", b, e.apply("mul", apart, e.apply("rsub", weight, 1.0)))
    return e.apply("where", e.apply("lt", e.apply("abs", weight), 0.5), near, far)


def truth(e: Expression, x: Value, node: Any) -> Value:
    """Return 1 where an operand is not 0; a tensor of bool is that already."""
    return x if _is_bool(node) else e.apply("ne", x, 0.0)


def _is_bool(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.meta["val"].dtype is torch.bool


def _is_half(node: Any) -> bool:
    return isinstance(node, fx.Node) and getattr(node.meta["val"], "dtype", None) is torch.bfloat16


def _logic(combine: Callable[[Expression, Value, Value], Value]) -> Lowering:
    """An operator on two tensors of truth."""

    def lower(e: Expression, o: Operands) -> Value | None:
        a, b = o["self"], o["other"]
        if not isinstance(a, Value) or not isinstance(b, Value):
            return None
        first, second = o["node"].args[:2]
        return combine(e, truth(e, a, first), truth(e, b, second))

    return lower


def _not(e: Expression, o: Operands) -> Value:
    return e.apply("logical_not", o["self"])


def converted(e: Expression, o: Operands) -> Value | None:
    """Return an operand in the type of the node's answer."""
    x, node = o["self"], o["node"]
    before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    if after is torch.bool:
        return truth(e, x, node.args[0])
    return e.apply("rounded", x) if after is torch.bfloat16 and before is torch.float32 else x


def _batch_norm(e: Expression, o: Operands) -> Value | None:
    """With the statistics of training, which are those of a channel."""
    x, mean, variance = o["input"], o["running_mean"], o["running_var"]
    if o["training"] or mean is None or variance is None:
        return None
    scale = e.apply("rsqrt", e.apply("add", variance, o["eps"]))
    scale = scale if o["weight"] is None else e.apply("mul", scale, o["weight"])
    y = e.apply("mul", e.apply("sub", x, mean), scale)
    return y if o["bias"] is None else e.apply("add", y, o["bias"])


_STEPS = "neg abs sqrt rsqrt reciprocal square exp expm1 log log1p sin cos tanh erf sigmoid silu relu floor ceil trunc"
_COMPARISONS = "eq ne lt le gt ge"

POINTWISE: dict[OpOverload, Lowering] = {
    **{getattr(aten, name).default: _one(name) for name in f"{_STEPS} round sign isnan".split()},
    **{
        getattr(getattr(aten, name), kind): _two(name) for name in _COMPARISONS.split() for kind in ("Tensor", "Scalar")
    },
    aten.add.Tensor: _two("add", "alpha"),
    aten.add.Scalar: _two("add", "alpha"),
    aten.sub.Tensor: _two("sub", "alpha"),
    aten.sub.Scalar: _two("sub", "alpha"),
    aten.mul.Tensor: _two("mul"),
    aten.mul.Scalar: _two("mul"),
    aten.div.Tensor: _two("div"),
    aten.div.Scalar: _two("div"),
    aten.div.Tensor_mode: _two("div"),
    aten.rsub.Scalar: _rsub,
    aten.rsub.Tensor: _rsub,
    aten.maximum.default: _two("maximum"),
    aten.minimum.default: _two("minimum"),
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: _power,
    aten.pow.Scalar: _power,
    aten.exp2.default: lambda e, o: e.apply("pow", 2.0, o["self"]),
    aten.gelu.default: _gelu,
    aten.leaky_relu.default: _leaky,
    aten.elu.default: _elu,
    aten.softplus.default: _softplus,
    aten.mish.default: lambda e, o: e.apply(
        "mul", o["self"], e.apply("tanh", _softplus(e, {**o, "beta": 1.0, "threshold": 20.0}))
    ),
    aten.relu6.default: _between("", "", 0.0, 6.0),
    aten.hardtanh.default: _between("min_val", "max_val"),
    aten.hardsigmoid.default: lambda e, o: _hard_sigmoid(e, o["self"]),
    aten.hardswish.default: lambda e, o: e.apply("mul", o["self"], _hard_sigmoid(e, o["self"])),
    aten.clamp.default: _between("min", "max"),
    aten.clamp.Tensor: _between("min", "max"),
    aten.clamp_min.default: _between("min", ""),
    aten.clamp_max.default: _between("", "max"),
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.lerp.Scalar: _lerp,
    aten.lerp.Tensor: _lerp,
    aten.batch_norm.default: _batch_norm,
    aten.logical_and.default: _logic(lambda e, a, b: e.apply("mul", a, b)),
    aten.logical_or.default: _logic(lambda e, a, b: e.apply("maximum", a, b)),
    aten.logical_xor.default: _logic(lambda e, a, b: e.apply("ne", a, b)),
    aten.logical_not.default: _not,
    aten.to.dtype: converted,
    aten._to_copy.default: converted,
    aten.clone.default: lambda e, o: o["self"],
    aten.contiguous.default: lambda e, o: o["self"],
}
"""What computes one value from those at its place."""

OF_BOOL: dict[OpOverload, OpOverload] = {
    aten.bitwise_and.Tensor: aten.logical_and.default,
    aten.__and__.Tensor: aten.logical_and.default,
    aten.bitwise_or.Tensor: aten.logical_or.default,
    aten.__or__.Tensor: aten.logical_or.default,
    aten.bitwise_xor.Tensor: aten.logical_xor.default,
    aten.bitwise_not.default: aten.logical_not.default,
}
"""Operators on bits that are those of logic where the tensors are of bool."""

TRUTHS = (*(getattr(getattr(aten, name), kind) for name in _COMPARISONS.split() for kind in ("Tensor", "Scalar")),)
"""Operators that answer with bool whatever they read, beside those of logic and conversions."""

_BOOL = {*TRUTHS, *OF_BOOL, *OF_BOOL.values(), aten.isnan.default}
_COPIES = {aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.contiguous.default}
_CHOICES = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf}


def lowering_of(node: fx.Node) -> Lowering | None:
    """Return how an element-wise operator is lowered, None for what is none or computes in a type that blocks lack."""
    target: Any = node.target
    made = node.meta["val"].dtype
    reads_bool = all(_is_bool(source) for source in node.all_input_nodes)
    if target in OF_BOOL:
        return POINTWISE[OF_BOOL[target]] if reads_bool else None
    found = POINTWISE.get(target)
    if target in TRUTHS and any(_is_half(source) for source in node.all_input_nodes):
        return None  # torch rounds the other operand to bfloat16 first: what compares equal there does not here
    if target in _BOOL or target in _COPIES or target in _CHOICES:
        return found
    return found if made is not torch.bool else None  # True + True is True
