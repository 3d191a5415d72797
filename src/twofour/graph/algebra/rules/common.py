"""What is computed twice is computed once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from twofour.capture import alike
from twofour.graph.algebra.rule import EXACT, SAME_BITS, Candidate, Rule
from twofour.graph.base import KNOWN_SPACES


def find(node: fx.Node) -> Iterator[Candidate]:
    """Yield an earlier call with the same arguments."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.all_input_nodes:
        return
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return
    if target.namespace not in KNOWN_SPACES:
        return  # an operator of others may answer as it likes, each time
    for twin in node.all_input_nodes[0].users:
        if twin.target is target and twin < node and _alike(twin, node):
            yield Candidate(node, (node, twin), lambda builder, twin=twin: twin)
            return


def _alike(one: fx.Node, other: fx.Node) -> bool:
    keys = sorted({*one.kwargs, *other.kwargs})
    given = ([*node.args, *(node.kwargs.get(key) for key in keys)] for node in (one, other))
    return alike(*given)


COMMON: tuple[Rule, ...] = (
    Rule(
        "computed twice",
        "f(A) and f(A)",
        "f(A)",
        EXACT,
        "every value; nothing random, nothing that the caller is given twice",
        SAME_BITS,
        "a call",
        "any",
        find=find,
    ),
)
