"""A model that was smoothed says so behind `load` too."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import twofour
from tests.compiler.test_smoothing import Block, batches, quick
from twofour.export.file import read, write


def _outliers(fast: Any) -> list[str]:
    return [note for note in fast.plan.notes if note.startswith("outliers")]


@pytest.mark.parametrize("smooth", [True, False])
def test_the_line_on_outliers_is_in_the_file(smooth: bool, tmp_path: Path) -> None:
    model = Block(nn.LayerNorm).eval()
    fast: Any = quick(model, batches()[0], dtype="int8", data=batches(), smooth=smooth)
    twofour.save(fast, tmp_path / "m")
    loaded: Any = twofour.load(tmp_path / "m", model)
    assert _outliers(loaded) == _outliers(fast) and len(_outliers(loaded)) == smooth
    twofour.save(loaded, tmp_path / "again")
    contents = read(tmp_path / "again")
    assert ("smoothed" in contents.settings) == smooth
    for strange in (3, "your model is lost", "outliers smoothed\x1b[2J"):
        contents.settings["smoothed"] = strange
        write(tmp_path / "again", contents)
        other: Any = twofour.load(tmp_path / "again", model)
        assert _outliers(other) == [] and "your model" not in str(other.plan)
