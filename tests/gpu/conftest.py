"""Tests that need an NVIDIA GPU: `make test-gpu`. Without one each is skipped with the reason."""

from pathlib import Path

import pytest

from twofour.native import gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here, reason = Path(__file__).parent, gpu.unavailable()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searched configurations and times stay out of the user's cache, and are shared by the session."""
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path_factory.getbasetemp() / "gpu-cache"))
