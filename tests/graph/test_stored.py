"""Graphs as JSON: what is written comes back the same, and damage is refused or gives a graph, never another error."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import Tensor, nn

from tests.fuzz.cursor import Cursor, edit_json
from tests.fuzz.targets.graph import EDITS, KEYS, stored
from twofour.capture import Guard, capture
from twofour.graph.stored import UnfitError, describe, rebuild
from twofour.graph.stored.seal import sealed


def test_what_is_written_comes_back() -> None:
    model, _, found = stored()
    rebuilt = rebuild(json.loads(found), model, {})
    assert describe(rebuilt.graph, rebuilt.leaves, frozenset(dict(model.named_parameters()))) == json.loads(found)
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
    draw, outcomes = random.Random(0), set()
    for _ in range(400):
        found = json.loads(good)
        cursor = Cursor(draw.randbytes(64))
        for _ in range(draw.randint(1, 3)):
            edit_json(cursor, found, EDITS, KEYS)
        try:
            rebuild(sealed(found), model, {})
            outcomes.add("rebuilt")
        except UnfitError as error:
            assert str(error)
            outcomes.add("refused")
    assert outcomes == {"rebuilt", "refused"}


def test_one_damaged_number_of_a_well_formed_graph_is_refused() -> None:
    model, _, good = stored()
    found = json.loads(good)
    (scale,) = (node for node in found["nodes"] if node[0].startswith("aten.mul"))
    scale[1][1] += 1
    rebuild(sealed(found), model, {})
    with pytest.raises(UnfitError, match="damaged"):
        rebuild(found, model, {})
