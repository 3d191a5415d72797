"""What the tests of pruned gradients share."""

import pytest

from twofour.training.sparse_linear import chooser


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small products too."""
    monkeypatch.setattr(chooser, "LEAST", 0)
