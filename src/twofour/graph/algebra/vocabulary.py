"""How the operators of expressions are spelled in ATen: read off nodes, and written as nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from twofour.graph.base import argument, aten, value

UNARY: dict[str, Any] = {
    "exp": aten.exp.default,
    "log": aten.log.default,
    "sqrt": aten.sqrt.default,
    "rsqrt": aten.rsqrt.default,
    "recip": aten.reciprocal.default,
    "abs": aten.abs.default,
    "neg": aten.neg.default,
    "square": aten.square.default,
    "relu": aten.relu.default,
}
BINARY: dict[str, tuple[Any, ...]] = {
    "add": (aten.add.Tensor, aten.add.Scalar),
    "sub": (aten.sub.Tensor, aten.sub.Scalar),
    "mul": (aten.mul.Tensor, aten.mul.Scalar),
    "div": (aten.div.Tensor, aten.div.Scalar),
    "shift": (aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor_Scalar),
    "matmul": (aten.matmul.default, aten.mm.default, aten.bmm.default),
}
REDUCTIONS: dict[str, tuple[Any, ...]] = {
    "sum": (aten.sum.dim_IntList, aten.sum.default),
    "mean": (aten.mean.dim, aten.mean.default),
    "prod": (aten.prod.dim_int, aten.prod.default),
}
SOFTMAX: dict[str, tuple[Any, ...]] = {
    "softmax": (aten.softmax.int, aten._softmax.default),
    "log_softmax": (aten.log_softmax.int, aten._log_softmax.default),
}
ASSOCIATIVE = ("add", "mul")
"""Read as one operator of all their terms, in any order."""

_NAMES: dict[Any, str] = {
    **{target: name for name, target in UNARY.items()},
    **{target: name for name, targets in {**BINARY, **REDUCTIONS, **SOFTMAX}.items() for target in targets},
    aten.linear.default: "linear",
    aten.pow.Tensor_Scalar: "pow",
    aten.rsub.Scalar: "rsub",
}


@dataclass(frozen=True)
class Operation:
    """What a node computes.

    Attributes:
        op: Its name in expressions.
        operands: Nodes and numbers; None for a bias that is missing.
        over: Of a reduction or softmax its axes, counted from the front, and whether they are kept.
    """

    op: str
    operands: tuple[Any, ...]
    over: tuple[tuple[int, ...], bool] | None = None


def read(node: Any) -> Operation | None:
    """Return what a node computes, None for what expressions have no word for."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or not isinstance(value(node), Tensor):
        return None
    name = _NAMES.get(node.target)
    if name is None:
        return None
    if name == "linear":
        return Operation(name, (node.args[0], node.args[1], argument(node, 2, "bias")))
    if name in REDUCTIONS or name in SOFTMAX:
        return _reduction(node, name)
    if node.kwargs or len(node.args) > 2:  # alpha, rounding_mode, out
        return None
    if name == "pow":
        return Operation("square", node.args[:1]) if argument(node, 1, "exponent") == 2 else None
    if name == "rsub":
        return Operation("sub", node.args[::-1])
    return Operation(name, tuple(node.args))


def _reduction(node: fx.Node, name: str) -> Operation | None:
    x: Any = node.args[0]
    rank = len(value(x).shape)
    if name in SOFTMAX:
        dims, keep = [argument(node, 1, "dim")], True
        changed = value(node).dtype != value(x).dtype
    else:
        dims = argument(node, 1, "dim") if node.target is not REDUCTIONS[name][1] else None
        keep, changed = bool(argument(node, 2, "keepdim", False)), value(node).dtype != _summed(value(x).dtype, name)
    dims = [dims] if isinstance(dims, int) else dims
    axes = tuple(sorted(dim % rank for dim in dims)) if dims and rank else tuple(range(rank))
    return None if changed else Operation(name, (x,), (axes, keep))


def _summed(dtype: torch.dtype, name: str) -> torch.dtype:
    whole = name in ("sum", "prod") and not dtype.is_floating_point and not dtype.is_complex
    return torch.int64 if whole else dtype


def target_of(op: str, operands: tuple[Any, ...], over: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return ATen's operator and arguments of an operation."""
    if op in UNARY:
        return UNARY[op], operands
    if op == "linear":
        return aten.linear.default, operands if operands[2] is not None else operands[:2]
    if op in REDUCTIONS:
        axes, keep = over
        if op == "prod":
            return (aten.prod.dim_int, (*operands, axes[0], keep)) if len(axes) == 1 else (aten.prod.default, operands)
        return REDUCTIONS[op][0], (*operands, list(axes), keep)
    if op in SOFTMAX:
        return SOFTMAX[op][0], (*operands, over[0][0])
    if op == "sub" and not isinstance(operands[0], fx.Node):
        return aten.rsub.Scalar, operands[::-1]
    if op == "cat":
        return aten.cat.default, (list(operands[:-1]), operands[-1])
    if op == "column":
        return aten.unsqueeze.default, (*operands, -1)
    if op == "transpose":
        return aten.transpose.int, (*operands, -2, -1)
    return BINARY[op][0], operands
