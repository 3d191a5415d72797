"""What is computed twice is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from twofour.graph.algebra.rule import EXACT, Candidate, Rule


def find(node: fx.Node) -> Iterator[Candidate]:
    """Yield an earlier call with the same arguments."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.all_input_nodes:
        return
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return
    for twin in node.all_input_nodes[0].users:
        if twin.target is target and twin < node and _alike(twin.args, node.args) and twin.kwargs == node.kwargs:
            yield Candidate(node, (node, twin), lambda builder, twin=twin: twin)
            return


def _alike(one: Any, other: Any) -> bool:
    """Tell whether arguments are the same; 1 and 1.0 and True are not, nor is -0.0 what 0.0 is."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return one is other or (type(one) is type(other) and repr(one) == repr(other))


COMMON: tuple[Rule, ...] = (
    Rule(
        "computed twice",
        "f(A) and f(A)",
        "f(A)",
        EXACT,
        "every value; nothing random, nothing that the caller is given twice",
        "0, bit for bit",
        "a call",
        "any",
        find=find,
    ),
)
