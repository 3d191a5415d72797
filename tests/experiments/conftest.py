"""What the tests of the experiments share: their folder on the path, and folders of a test's own."""

import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="module", autouse=True)
def on_path():
    sys.path.insert(0, str(EXPERIMENTS))
    yield
    sys.path.remove(str(EXPERIMENTS))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import page
    import records
    import run

    for module in (records, run):
        monkeypatch.setattr(module, "SCRATCH", tmp_path / "runs")
    monkeypatch.setattr(records, "TRACKED", tmp_path / "records")
    monkeypatch.setattr(page, "PAGE", tmp_path / "results.md")
    return tmp_path
