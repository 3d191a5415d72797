"""What the tests of the benchmark suite share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cases(benchmarks: Path):
    """The cases that several tests use."""
    from cases import bits, grid, linear, mask, models, models_table, records, recurrent, shapes, shrunk, table

    return {
        module.__name__.split(".")[1]: module
        for module in (bits, grid, linear, mask, models, models_table, records, recurrent, shapes, shrunk, table)
    }


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.txt"
    path.write_text("# name out in\na 64 32\n\nb 32 64 # comment\n")
    return path
