"""Graphs as JSON: what is written comes back the same, and damage is refused or gives a graph, never another error."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from tests.fuzz.cursor import WORDS, Cursor, edit_json
from twofour.capture import Guard, capture
from twofour.graph.stored import UnfitError, describe, rebuild


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv = nn.Linear(8, 8), nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor, how: dict[str, Any]) -> tuple[Tensor, ...]:
        x = self.fc(self.conv(x)).masked_fill(x > 1, float("-inf")).softmax(-1) * how["scale"]
        return x.flatten(1), x.transpose(1, 2).chunk(2, -1)[0], x.mean((1, 2)).to(torch.bfloat16)


def stored() -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    model, given = Small().eval(), {"x": torch.randn(2, 4, 8), "how": {"scale": 3}}
    names = frozenset(name for name, _ in model.named_parameters())
    return model, given, describe(capture(model, given), tree_flatten(given)[0], names)


def test_what_is_written_comes_back() -> None:
    model, _, found = stored()
    rebuilt = rebuild(json.loads(json.dumps(found)), model, {})
    assert describe(rebuilt.graph, rebuilt.leaves, frozenset(dict(model.named_parameters()))) == found
    other = torch.randn(5, 4, 8)
    leaves = Guard(rebuilt.graph).leaves({"x": other, "how": {"scale": 3}})
    assert leaves is not None and Guard(rebuilt.graph).leaves({"x": other, "how": {"scale": 4}}) is None
    with torch.no_grad():
        torch.testing.assert_close(rebuilt.graph.module(*leaves), model(other, {"scale": 3}))


def test_an_operator_without_a_row_is_not_written() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x)

    given = {"x": torch.randn(3, 4, 4)}
    with pytest.raises(UnfitError, match="linalg_inv"):
        describe(capture(Odd(), given), [given["x"]], frozenset())


def test_damage_is_refused_or_gives_a_graph() -> None:
    model, _, good = stored()
    words = [*WORDS, "aten.full.default", "mul", "getitem", "s0", "float64", {"node": 0}, {"node": 9}, {"tuple": [1]}]
    words += [{"weight": "fc.weight"}, {"constant": 0}, {"float": "nan"}, "L['x'].size()[0] > 1", "max(1, 2) // 0"]
    draw, outcomes = random.Random(0), set()
    for _ in range(400):
        found = copy.deepcopy(good)
        cursor = Cursor(draw.randbytes(64))
        for _ in range(draw.randint(1, 3)):
            edit_json(cursor, found, words, ("x", "dict", "tuple", "node"))
        try:
            rebuild(found, model, {})
            outcomes.add("rebuilt")
        except UnfitError as error:
            assert str(error)
            outcomes.add("refused")
    assert outcomes == {"rebuilt", "refused"}
