"""A search that was stopped goes on where it was, and ends with the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.shrinking.test_depth import ROWS, stack
from twofour import shrinking
from twofour.errors import ShrinkError
from twofour.journal import Journal
from twofour.shrinking import reconstruct

STEP = Journal.step


def shrunk(folder: Path | None, budget: float = 0.53) -> nn.Module:
    options: dict[str, Any] = {"data": [ROWS], "samples": 128, "multiple": 4, "progress": False}
    return twofour.shrink(stack((3.0, 1e-3, 2.0)), ROWS[:2], budget, layers="auto", checkpoint=folder, **options)


def same(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    alike = first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    return alike and str(shrinking.report_of(one)) == str(shrinking.report_of(other))


def stopping(at: str) -> Callable[..., Any]:
    def step(journal: Journal, name: str, make: Callable[[], Any]) -> Any:
        if at in name:
            raise KeyboardInterrupt
        return STEP(journal, name, make)

    return step


def test_a_stopped_search_goes_on_and_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, noted = shrunk(None), list[str]()
    folder = tmp_path / "search"
    for at in ("what layers give", "`1.2.a.weight:0` loses", "loses, without 1.1"):
        monkeypatch.setattr(Journal, "step", stopping(at))
        with pytest.raises(KeyboardInterrupt):
            shrunk(folder)

    def listed(journal: Journal, name: str, make: Callable[[], Any]) -> Any:
        noted.extend([] if name in journal.done else [name])
        return STEP(journal, name, make)

    monkeypatch.setattr(Journal, "step", listed)
    assert same(shrunk(folder), whole)
    assert noted and all("without 1.1" in name for name in noted), "what was known is not looked for again"
    noted.clear()
    assert same(shrunk(folder), whole) and noted == []


def test_layers_that_were_solved_are_not_solved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, solve, count = shrunk(None, 0.3), reconstruct._solve, [0, 0]
    folder, report = tmp_path / "search", shrinking.report_of(whole)
    assert report is not None and len(report.reconstructed) == 2

    def counted(*given: Any) -> None:
        if sum(count) == 1 and not count[1]:
            count[1] += 1
            raise KeyboardInterrupt
        count[0] += 1
        solve(*given)

    monkeypatch.setattr(reconstruct, "_solve", counted)
    with pytest.raises(KeyboardInterrupt):
        shrunk(folder, 0.3)
    assert same(shrunk(folder, 0.3), whole)
    assert count == [2 + 3, 1], "two without a layer, three with all: channels alone are tried too"
    for file in (folder / "work").glob("*.safetensors"):
        file.write_bytes(b"damaged")
    assert same(shrunk(folder, 0.3), whole) and count == [10, 1]


def test_a_folder_of_another_search_or_of_something_else_is_left_alone(tmp_path: Path) -> None:
    shrunk(tmp_path / "one")
    with pytest.raises(ShrinkError, match=r"holds another run[\s\S]*the same limit[\s\S]*another checkpoint folder"):
        shrunk(tmp_path / "one", 0.6)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "mine.txt").write_text("mine")
    with pytest.raises(ShrinkError, match=r"holds something else[\s\S]*mine\.txt"):
        shrunk(tmp_path / "two")
    assert (tmp_path / "two" / "mine.txt").read_text() == "mine"
