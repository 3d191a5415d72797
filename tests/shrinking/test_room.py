"""room: a budget that cannot be met is refused from the shapes, and what stands in the way is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.shrinking.test_depth import ROWS, stack
from twofour import shrinking
from twofour.shrinking.budget import UnmetError


def refused(model: nn.Module, example: Any, budget: Any, **options: Any) -> UnmetError:
    with pytest.raises(UnmetError, match="the budget cannot be met") as caught:
        twofour.shrink(model, example, budget, progress=False, **options)
    return caught.value


@pytest.mark.parametrize("layers", [(), "auto"])
def test_an_impossible_budget_is_refused_before_anything_is_ranked(layers: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": ROWS, "layers": layers, "checkpoint": tmp_path / "search"}
    error = refused(stack((1.0, 1.0, 1.0)), ROWS[:2], 0.01, **options)
    done = json.loads((tmp_path / "search" / "shrink.json").read_text())["done"]
    assert not any("loses" in step for step in done)
    small = twofour.shrink(stack((1.0, 1.0, 1.0)), ROWS[:2], error.least + 0.001, data=ROWS, layers=layers)
    report = shrinking.report_of(small)
    assert report is not None and report.parameters[1] <= (error.least + 0.001) * report.parameters[0]


@pytest.mark.parametrize("kind", ["parameters", "bytes"])
def test_what_holds_most_and_stays_whole_is_named(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(400, 16), nn.LayerNorm(16), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    error = refused(model, torch.randint(0, 400, (2, 5)), shrinking.Budget(**{kind: 0.2}))
    assert f"`0.weight` alone is {6400 / 8040:.3f} of the {kind} and stays whole" in str(error)
    assert "multiple" not in str(error.reasons) and "least=" not in str(error.reasons)


def test_options_that_stand_in_the_way_are_named() -> None:
    model = stack((1.0, 1.0))
    error = refused(model, ROWS[:2], 0.4, multiple=48)
    assert error.reasons == ("multiple=48 stands in the way: the budget can be met without it",)
    error = refused(model, ROWS[:2], 0.1, multiple=128, streams=False)
    assert "multiple=128 stands in the way: 0.2" in error.reasons[-1] and error.least == 1
    error = refused(model, ROWS[:2], 0.5, least=0.6, streams=False)
    assert error.reasons == ("least=0.6 stands in the way: the budget can be met without it",)
