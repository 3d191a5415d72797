from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.small import ZOO
from twofour.cli import app


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a command in a folder that holds the module `zoo_cli`."""
    (tmp_path / "zoo_cli.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path / "cache"))
    yield lambda *words: CliRunner().invoke(app, list(words))
    sys.modules.pop("zoo_cli", None)
