"""Files of libtwofour written by a call and by the command; what has no program is refused with the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import twofour
from tests.export.runtime import library as lib
from tests.export.runtime.models import ROOT, compiled, mlp, pruned
from twofour import export
from twofour.cli import app
from twofour.errors import ExportError


def test_what_has_no_program_is_refused_with_the_way_out(tmp_path: Path) -> None:
    fast, example = compiled("mlp")
    refused = [
        (lambda: export.to_runtime(mlp(), tmp_path / "x", example(2)), "not compiled"),
        (lambda: export.to_runtime(fast, tmp_path / "x"), "needs an example"),
        (lambda: export.to_runtime(fast, tmp_path / "x", torch.randn(2, 63)), "does not hold for an example"),
        (lambda: export.to_runtime(fast, tmp_path, example(2)), "cannot be written"),
    ]
    for call, text in refused:
        with pytest.raises(ExportError, match=text):
            call()
    assert not (tmp_path / "x").exists()


class Joined(nn.Module):
    """Outputs whose names, joined by dots, may be the same, and an input that is not used."""

    def __init__(self, apart: str) -> None:
        super().__init__()
        self.inner, self.apart = nn.Linear(64, 64), apart

    def forward(self, x: Tensor, unused: Tensor | None = None) -> dict[str, Any]:
        """Return {"a.b": (N, 64), "a": {apart: (N, 64)}} of (N, 64)."""
        y = self.inner(x)
        return {"a.b": y, "a": {self.apart: y + 1}}


def test_names_that_collide_and_unknown_numbers_are_refused(tmp_path: Path) -> None:
    given = {"x": torch.randn(2, 64)}, {"x": torch.randn(2, 64), "unused": torch.zeros(2, dtype=torch.float64)}
    for apart, example, text in (("b", given[0], "two outputs have one name"), ("c", given[1], "does not know")):
        model = twofour.prune(Joined(apart).eval(), "2:4")
        fast = twofour.compile(model, example, graph="native", tokens=(1,))
        with pytest.raises(ExportError, match=text):
            export.to_runtime(fast, tmp_path / "x", example)
    assert not (tmp_path / "x").exists()


def test_the_command_writes_a_file_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    out, said = tmp_path / "mlp.2f4", tmp_path / "said.json"
    given = ["export", "tests.export.runtime.models:pruned", "--to", "runtime", "--input", "64", "--out", str(out)]
    result = CliRunner().invoke(app, [*given, "--json", str(said)])
    assert result.exit_code == 0, result.output
    model, x = lib.Model(out), torch.randn(1, 64)
    torch.testing.assert_close(model.run({"input": x})["output"], pruned()(x), rtol=1e-4, atol=1e-5)
    assert json.loads(said.read_text())["inputs"] == [{"input": [1, 64]}]
    wrong = CliRunner().invoke(app, [*given[:-1], str(tmp_path / "other"), "--opset", "20"])
    assert wrong.exit_code != 0 and "means nothing for --to runtime" in wrong.output
