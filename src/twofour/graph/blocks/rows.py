"""Reductions over the last axes, and operators that are made of them, as steps of a fused block."""

from __future__ import annotations

from typing import Any

from torch import fx

from twofour.graph.base import aten
from twofour.graph.blocks.pointwise import Lowering, Operands
from twofour.kernels.fused_block import Expression, Value


def _reduced(step: str) -> Lowering:
    return lambda e, o: e.apply(step, o["self"])


def mean(e: Expression, x: Value) -> Value:
    """Return a row's mean."""
    return e.apply("over_width", e.apply("sum", x))


def _variance(e: Expression, o: Operands) -> Value | None:
    correction = o.get("correction", float(o.get("unbiased", True)))
    correction = 1 if correction is None else correction
    sizes = o["node"].args[0].meta["val"].shape
    count = 1
    for axis in axes_of(o["node"]):
        count = count * sizes[axis]
    apart = e.apply("sub", o["self"], mean(e, o["self"]))
    squares = e.apply("sum", e.apply("square", apart))
    if correction == 0:
        return e.apply("over_width", squares)
    return e.apply("div", squares, float(max(count - correction, 0))) if isinstance(count, int) else None


def _deviation(e: Expression, o: Operands) -> Value | None:
    found = _variance(e, o)
    return None if found is None else e.apply("sqrt", found)


def _exponentials(e: Expression, x: Value) -> tuple[Value, Value, Value]:
    """Return x less its largest, the exponentials of that, and their sum."""
    below = e.apply("sub", x, e.apply("amax", x))
    powers = e.apply("exp", below)
    return below, powers, e.apply("sum", powers)


def _softmax(e: Expression, o: Operands) -> Value:
    _, powers, total = _exponentials(e, o["self"])
    return e.apply("mul", powers, e.apply("reciprocal", total))  # a division at each place is a third of the time


def _log_softmax(e: Expression, o: Operands) -> Value:
    below, _, total = _exponentials(e, o["self"])
    return e.apply("sub", below, e.apply("log", total))


def _norm(e: Expression, o: Operands) -> Value | None:
    order = o.get("ord", o.get("p", 2))
    if order not in (1, 2):
        return None
    if order == 1:
        return e.apply("sum", e.apply("abs", o["self"]))
    return e.apply("sqrt", e.apply("sum", e.apply("square", o["self"])))


def _layer_norm(e: Expression, o: Operands) -> Value:
    x = o["input"]
    apart = e.apply("sub", x, mean(e, x))
    return _weighted(e, o, apart, mean(e, e.apply("square", apart)), o["eps"])


def _rms_norm(e: Expression, o: Operands) -> Value:
    x, eps = o["input"], o["eps"]
    return _weighted(e, o, x, mean(e, e.apply("square", x)), 1.1920928955078125e-07 if eps is None else eps)


def _weighted(e: Expression, o: Operands, apart: Value, variance: Value, eps: float) -> Value:
    y = e.apply("mul", apart, e.apply("rsqrt", e.apply("add", variance, eps)))
    y = e.apply("mul", y, o["weight"]) if o.get("weight") is not None else y
    return e.apply("add", y, o["bias"]) if o.get("bias") is not None else y


def _pooled(e: Expression, o: Operands) -> Value | None:
    return mean(e, o["self"]) if all(size == 1 for size in o["output_size"]) else None


REDUCTIONS: dict[Any, Lowering] = {
    aten.sum.dim_IntList: _reduced("sum"),
    aten.mean.dim: lambda e, o: mean(e, o["self"]),
    aten.amax.default: _reduced("amax"),
    aten.amin.default: _reduced("amin"),
    aten.prod.dim_int: _reduced("prod"),
    aten.var.correction: _variance,
    aten.var.dim: _variance,
    aten.std.correction: _deviation,
    aten.std.dim: _deviation,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.adaptive_avg_pool1d.default: _pooled,
    aten.adaptive_avg_pool2d.default: _pooled,
}
"""What makes one number of a row; `keepdim` says whether the reduced axes stay."""

_POOLS: dict[Any, int] = {aten.adaptive_avg_pool1d.default: 1, aten.adaptive_avg_pool2d.default: 2}

WHOLE_ROWS: dict[Any, Lowering] = {
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _log_softmax,
    aten._log_softmax.default: _log_softmax,
    aten.layer_norm.default: _layer_norm,
    aten.rms_norm.default: _rms_norm,
}
"""What makes a row of a row."""


def axes_of(node: fx.Node) -> tuple[int, ...]:
    """Return the axes that a reduction or an operator on rows takes together, from 0 on, in order."""
    source: Any = node.args[0]
    ndim = source.meta["val"].ndim
    if node.target in (aten.layer_norm.default, aten.rms_norm.default):
        normalised: Any = node.args[1]
        return tuple(range(ndim - len(normalised), ndim))
    if node.target in _POOLS:
        return tuple(range(ndim - _POOLS[node.target], ndim))
    given: Any = next((node.kwargs[name] for name in ("dim", "axis") if name in node.kwargs), None)
    if given is None:
        place = 2 if node.target in (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim) else 1
        given = node.args[place] if len(node.args) > place else None
    if given is None or given == []:
        return tuple(range(ndim))
    return tuple(sorted(axis % ndim for axis in (given if isinstance(given, list | tuple) else [given])))


def keeps_axes(node: fx.Node) -> bool:
    """Tell whether a reduction leaves its axes with size 1."""
    if node.target in _POOLS:
        return True
    names = [argument.name for argument in node.target._schema.arguments]  # pyright: ignore
    place = names.index("keepdim")
    return bool(node.args[place] if len(node.args) > place else node.kwargs.get("keepdim", False))
