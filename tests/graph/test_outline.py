"""Outlines of graphs, where their calls are drawn, and the figure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from twofour.capture import arguments, capture
from twofour.errors import CompileError
from twofour.graph import Outline, outline, plot
from twofour.graph.mapping import MappingType
from twofour.graph.outline import Call


class Residual(nn.Module):
    """A layer, a view, and a sum that reads the input again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.fc(x)).view(-1, 8, 8).transpose(1, 2)
        return (y.reshape(-1, 64) + x).softmax(-1)


def captured() -> Outline:
    model = Residual().eval()
    return outline(capture(model, arguments(model, (torch.randn(4, 64),), {})).module)


def test_calls_have_types_bytes_and_what_they_read() -> None:
    calls = {call.label: call for call in captured().calls}
    assert [calls[name].mapping for name in ("linear", "relu", "transpose", "softmax")] == [
        MappingType.MANY_TO_MANY,
        MappingType.ONE_TO_ONE,
        MappingType.SHUFFLE,
        MappingType.MANY_TO_MANY,
    ]
    assert calls["relu"].nbytes == 4 * 64 * 4 and calls["transpose"].nbytes == 0 and calls["view"].kind == "view"
    order = [call.label for call in captured().calls]
    assert [order[read] for read in calls["relu"].reads] == ["linear"]
    assert captured().computing == 5 and captured().nbytes == 5 * 4 * 64 * 4  # the reshape copies


def test_an_operator_without_a_row_has_no_type() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.bessel_j0(x)

    model = Odd()
    found = outline(capture(model, arguments(model, (torch.randn(4),), {})).module)
    assert [call.mapping for call in found.calls] == [None]


def test_places_are_below_what_is_read_and_never_shared() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 2, 7, 60):
        calls = []
        for index in range(size):
            read = torch.randint(index, (2,), generator=generator).tolist() if index else []
            calls.append(Call("add", None, "operator", 4, tuple(set(read))))
        found = plot.places(calls)
        assert len(set(found)) == size
        assert all(found[read][1] < line for call, (_, line) in zip(calls, found, strict=True) for read in call.reads)


def test_a_plan_draws_the_graph_before_and_after(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    x = torch.randn(4, 64)
    fast = twofour.compile(Residual().eval(), example=x)
    fast.plan.draw(tmp_path / "graph.svg")
    text = (tmp_path / "graph.svg").read_text()
    assert "before: 5 calls" in text and "after: " in text and "softmax" in text and "Many-to-Many" in text
    assert plot.COLOURS[MappingType.SHUFFLE] in text
    assert "outlines" in fast.plan.to_dict()["account"]
    with pytest.raises(CompileError, match=r"cannot be drawn(.|\n)*\.svg, \.png or \.pdf"):
        fast.plan.draw(tmp_path / "graph.txt")


def test_a_plan_without_a_graph_says_so(tmp_path: Path) -> None:
    plan = twofour.compile(Residual().eval()).plan
    with pytest.raises(CompileError, match=r"no graph to draw(.|\n)*no example(.|\n)*example="):
        plan.draw(tmp_path / "graph.svg")
