"""Rules: which axes of an operator's tensors are the same channels.

A rule returns the axes of the answer. It has to hold for every order of every axis that it does not fix: the operator
on permuted tensors gives the permuted answer. What has no rule is fixed, with the operator's name as the reason.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from twofour.structure.coupling.axes import fix
from twofour.structure.coupling.call import Call, Value, fresh

Rule = Callable[[Call], Value]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators of ATen, named with blanks between them."""

    def register(function: Rule) -> Rule:
        RULES.update({f"aten::{name}": function for name in " ".join(names).split()})
        return function

    return register


def fix_all(call: Call, reason: str) -> Value:
    """Keep the order of everything an operator touches."""
    for axes in call.operands():
        for axis in axes:
            fix(axis, reason)
    answers = [[fresh(size, reason) for size in shape] for shape in call.shapes]
    single = isinstance(call.node.meta.get("val"), Tensor) or not answers
    return answers[0] if single and answers else answers
