"""report: what is printed is said once, and a folder that from_pretrained cannot load is announced."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.structure.shrink.networks import made
from twofour import shrinking
from twofour.structure.shrink import AttributeCut, Uncut


def test_what_from_pretrained_cannot_load_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers", reason="needs the extra [text]")
    model, example = made("gpt2")
    said: dict[bool, Any] = {}
    for uniform in (False, True):
        caplog.clear()
        report = shrinking.report_of(twofour.shrink(model, example, 0.9, uniform=uniform, least=0.1, streams=False))
        assert report is not None
        said[uniform] = [line for line in str(report).splitlines() if "from_pretrained cannot load" in line]
        assert [line.strip() for line in said[uniform]] == [m for m in caplog.messages if "cannot load" in m]
        assert len(said[uniform]) == bool(report.unloadable) == bool(report.config)
    assert "uniform=True" in said[False][0] and "twofour.load" in said[False][0] and said[True] == []


def test_what_stays_whole_is_said_once_and_numbers_only_where_they_change() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    report = shrinking.report_of(twofour.shrink(model, torch.randn(2, 8), 0.7))
    assert report is not None and report.unloadable == "" and "from_pretrained" not in str(report)
    whole = tuple(Uncut((f"{name}.weight",), size, "it is") for name, size in (("a", 4), ("b", 4), ("a", 4), ("c", 8)))
    numbers = (AttributeCut("attention", "num_heads", 4, 2), AttributeCut("attention", "groups", 2, 2))
    text = str(replace(report, uncut=whole, cut=replace(report.cut, attributes=numbers)))
    assert [line.strip() for line in text.splitlines() if "stays whole" in line] == [
        str(Uncut(("a.weight", "b.weight"), 4, "it is")),
        str(whole[3]),
    ]
    assert "num_heads" in text and "groups" not in text
