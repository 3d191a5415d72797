"""GELU written out with tanh, as GPT-2 and its descendants do, becomes one operator."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from twofour.graph.base import Rule, aten, calls, insert, replace_with


def rewrite(module: fx.GraphModule) -> int:
    """Replace 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) by gelu."""
    count = 0
    for tanh in calls(module.graph, aten.tanh.default):
        found = _read(tanh)
        if found is not None:
            x, last = found
            new = insert(last, aten.gelu.default, (x,), last)
            new.kwargs = {"approximate": "tanh"}
            replace_with(last, new)
            count += 1
    module.graph.eliminate_dead_code()
    return count


def _read(tanh: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return x and the last node of the formula around `tanh`."""
    inner, factor = _with_number(tanh.args[0], aten.mul.Tensor)
    cubed_sum = inner if factor is not None and math.isclose(factor, math.sqrt(2 / math.pi), rel_tol=1e-5) else None
    if not isinstance(cubed_sum, fx.Node) or cubed_sum.target is not aten.add.Tensor or cubed_sum.kwargs:
        return None
    x, cubic = cubed_sum.args[:2]
    cube, small = _with_number(cubic, aten.mul.Tensor)
    if small is None or not math.isclose(small, 0.044715, rel_tol=1e-5) or not isinstance(cube, fx.Node):
        return None
    if cube.target is not aten.pow.Tensor_Scalar or cube.args != (x, 3.0):
        return None
    plus_one = _only_user(tanh, aten.add.Tensor)
    last = _only_user(plus_one, aten.mul.Tensor) if plus_one is not None and _with_number(plus_one)[1] == 1.0 else None
    if last is None or not isinstance(x, fx.Node):
        return None
    half = next((argument for argument in last.args if argument is not plus_one), None)
    return (x, last) if _with_number(half, aten.mul.Tensor) == (x, 0.5) else None


def _with_number(node: Any, target: Any = None) -> tuple[Any, float | None]:
    """Return operand and number of `operand op number`, in either order."""
    if not isinstance(node, fx.Node) or (target is not None and node.target is not target) or len(node.args) != 2:
        return None, None
    if node.kwargs:  # an addition's `alpha` multiplies what is added
        return None, None
    a, b = node.args
    if isinstance(b, int | float):
        return a, float(b)
    return (b, float(a)) if isinstance(a, int | float) else (None, None)


def _only_user(node: fx.Node | None, target: Any) -> fx.Node | None:
    users = list(node.users) if node is not None else []
    return users[0] if len(users) == 1 and users[0].target is target else None


GELU_FORMULA = Rule("GELU written out", rewrite)
