"""What tests of training share."""

import pytest

from twofour.training.both_ways import Choice, choose


@pytest.fixture
def gaining(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Sizes (rows, columns) of operands B that are multiplied faster 2:4, while nothing is timed."""
    sizes: set[tuple[int, int]] = set()

    def measured(call, source, seconds, more=None):
        kernels, why = source.kernels(call)
        gains = bool(kernels) and tuple(call.b.shape) in sizes
        times = {"dense_ms": 2.0, "sparse_ms": (1.0 if gains else 3.0) if kernels else None}
        return Choice(kernels[0].name if gains else "torch", gains, why or "made up", **times)

    monkeypatch.setattr(choose, "measured", measured)
    return sizes
