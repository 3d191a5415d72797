"""What is known of a tensor's values without running the model: which are never negative."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from twofour.graph.algebra.vocabulary import read
from twofour.graph.base import aten, value

_ABOVE = ("exp", "abs", "square", "softmax")
"""Never negative, and their zeros are +0.0, of which the reciprocal is +inf."""
_POSITIVE = (*_ABOVE, "relu", "sqrt")
_KEEPING = ("add", "mul", "sum", "mean", "prod")
_DIVIDING = ("div", "recip", "rsqrt")
_OTHERS = (aten.sigmoid.default, aten.relu6.default, aten.hardsigmoid.default)
_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.contiguous.default,
    aten.clone.default,
    aten.slice.Tensor,
    aten.select.int,
)


def never_negative(given: Any, depth: int = 8) -> bool:
    """Tell whether every value is 0 or more, or NaN, whatever the model is given. A constant's values are looked at."""
    if not isinstance(given, fx.Node):
        return given is not None and given >= 0
    if given.op == "get_attr":
        held = attribute(given)
        return isinstance(held, Tensor) and not sealed(given) and not bool((held < 0).any())
    if depth == 0 or given.op != "call_function":
        return False
    if given.target in _OTHERS:
        return True
    if given.target in _VIEWS:
        return never_negative(given.args[0], depth - 1)
    found = read(given)
    if found is None:
        return False
    if found.op in _POSITIVE or (found.op == "mul" and found.operands[0] is found.operands[1]):
        return bool(value(given).dtype.is_floating_point)
    if found.op in _DIVIDING:
        *above, below = found.operands
        return all(never_negative(operand, depth - 1) for operand in above) and _above(below)
    return found.op in _KEEPING and all(never_negative(operand, depth - 1) for operand in found.operands)


def _above(given: Any) -> bool:
    """Tell whether every value is +0.0 or more, or NaN: of -0.0 the reciprocal is -inf."""
    if not isinstance(given, fx.Node):
        return given is not None and given > 0
    found = read(given)
    square = found is not None and found.op == "mul" and found.operands[0] is found.operands[1]
    return found is not None and (found.op in _ABOVE or square)


def attribute(node: fx.Node) -> Any:
    """Return what a `get_attr` node stands for."""
    if "held" in node.meta:
        return node.meta["held"]()
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def sealed(node: fx.Node) -> str:
    """Return why the values of a constant may not be merged with others, "" where they may."""
    return str(node.meta.get("sealed", ""))
