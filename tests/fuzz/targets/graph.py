"""Graphs of saved models: damaged JSON is refused with a reason, or gives a graph that runs on the example it names."""

from __future__ import annotations

import json
import zlib
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from tests.fuzz.cursor import WORDS, Cursor, edit_json
from twofour.capture import Guard, capture
from twofour.checkpoints.limits import limited
from twofour.graph.stored import describe, rebuild
from twofour.graph.stored.check import require_graph
from twofour.graph.stored.seal import sealed

TRACED = ("twofour.graph.stored", "twofour.capture")
BUILT = 64
"""One of so many inputs is also built where it is well formed, which takes a thousand times longer than the check."""

SEEDS = (b"", b"1")

EDITS: list[Any] = [*WORDS, "aten.full.default", "mul", "getitem", "s0", "float64", "bool", {"node": 0}, {"node": 9}]
EDITS += [{"tuple": [1]}, {"weight": "fc.weight"}, {"constant": 0}, {"float": "nan"}, {"node": -1}, {"float": "inf"}]
EDITS += [
    "L['x'].size()[0] > 1",
    "max(1, 2) // 0",
    "L['x'].size()[0] ** 9",
    "L['x'].size()[0] % (L['x'].size()[0] - 2)",
    "__import__('os')",
    "aten.linear.default",
]
EDITS += ["aten.softmax.int", "aten.view.default", "aten.copy_.default", "layer", "fc", "conv", "conv.weight", "int64"]
KEYS = ("x", "dict", "tuple", "node", "weight", "value", "version", "nodes", "s0", "s1")


class Small(nn.Module):
    """A model of two layers whose graph has weights, constants, sizes, views and several answers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv = nn.Linear(8, 8), nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor, how: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return (B, 32), (B, 8, 2) and (B,) of (B, 4, 8)."""
        x = self.fc(self.conv(x)).masked_fill(x > 1, float("-inf")).softmax(-1) * how["scale"]
        return x.flatten(1), x.transpose(1, 2).chunk(2, -1)[0], x.mean((1, 2)).to(torch.bfloat16)


@cache
def stored() -> tuple[nn.Module, dict[str, Any], str]:
    """Return the model, an example for it, and the text of its graph."""
    torch.manual_seed(0)
    model, given = Small().eval(), {"x": torch.randn(2, 4, 8), "how": {"scale": 3}}
    names = frozenset(name for name, _ in model.named_parameters())
    return model, given, json.dumps(describe(capture(model, given), tree_flatten(given)[0], names))


def build(data: bytes) -> tuple[bool, dict[str, Any]]:
    """Return whether the graph is built where it is well formed, and its JSON."""
    cursor = Cursor(data)
    built = zlib.crc32(data) % BUILT == 0  # of nothing it is 0; a fuzzer does not learn it
    found = json.loads(stored()[2])
    for _ in range(4):
        if cursor.empty:
            break
        edit_json(cursor, found, EDITS, KEYS)
    return built, sealed(found)  # what is behind the digest is tried too


def run(built: tuple[bool, dict[str, Any]]) -> str:
    """Check it and build it; what is built runs on its example, or torch refuses that with a word."""
    builds, found = built
    model, _, _ = stored()
    try:
        require_graph(found, {name for name, _ in model.named_parameters()})
        if not builds:
            return "well formed"
        with limited(), torch.no_grad():
            made = rebuild(found, model, {})
    except (ValueError, RecursionError, MemoryError) as error:  # as the loader does
        assert str(error) or type(error) is MemoryError, "a refusal without a reason"
        return "refused"
    Guard(made.graph).leaves(made.graph.inputs.value(made.leaves))  # a graph may not hold for its own example
    try:
        with torch.no_grad():
            answers = made.graph.module(*made.leaves)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:  # torch's operators: values that it refuses
        assert str(error), "a refusal without a reason"
        return "refused when run"
    assert len(tree_flatten(answers)[0]) == made.answers
    return "ran"
