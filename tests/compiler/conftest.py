from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def shared_cache(times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))


@pytest.fixture
def own_cache(shared_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path / "times"))
    return tmp_path / "times"
