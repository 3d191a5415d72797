"""`twofour explain`: words, figure, JSON, and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.small import refused
from twofour import compiler


def test_the_graph_before_and_after(run) -> None:
    pytest.importorskip("matplotlib")
    done = run("explain", "zoo_cli:small", "--input", "64", "--threads", "1", "--out", "g.svg", "--json", "g.json")
    assert done.exit_code == 0, done.output
    assert "before: " in done.stdout and "after: " in done.stdout and "whole model: " in done.stdout
    assert "<svg" in Path("g.svg").read_text()
    account = json.loads(Path("g.json").read_text())["account"]
    assert account["outlines"]["before"]["calls"] >= account["outlines"]["after"]["calls"] > 0


def test_without_matplotlib_nothing_is_measured_first(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(compiler, "compile", lambda *_, **__: pytest.fail("it was measured"))
    refused(run("explain", "zoo_cli:small", "--input", "64", "--out", "g.svg"), "matplotlib", "pip install")


def test_refusals(run) -> None:
    refused(run("explain", "zoo_cli:small"), "the shape of its input is not known", "--input")
    refused(run("explain", "zoo_cli:small", "--input", "64", "--out", "g.txt"), "cannot be drawn")
    refused(
        run("explain", "zoo_cli:small", "--input", "64", "--rules", "loose"), "rules are not known", "exact", "close"
    )
