"""The benchmarks of training: whole steps and their parts, repetitions on the same batches, permutations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.benchmarks.suite import suite
from twofour import measure
from twofour.errors import DataError


def test_training_times_whole_steps_and_their_parts(
    cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from cases import training

    for name, size in {"WIDTH": 32, "HIDDEN": 64, "HEADS": 2, "SEQUENCE": 8, "SEQUENCES": 2, "DEPTH": 1}.items():
        monkeypatch.setattr(training, name, size)
    others = [name for name in (*training.DENSE, *training.SPARSE) if name != training.BOTH]
    assert set(training.steps(torch.float32, "every=2", 2, others[:-1], 0.01)) == {training.BOTH, training.ALL}
    (cell,) = training.cells(["float32"], "fixed", 2)
    record = training.Bench(0.01, [training.COMPILED])(cell)
    assert set(record.timings) == {*training.DENSE, *training.SPARSE} - {training.COMPILED}
    assert set(record.baseline) == {training.EAGER, training.CONTROL}
    parts = record.meta["parts"]
    assert set(parts) == {training.CONTROL, *training.SPARSE}
    assert all(seconds >= 0 for profile in parts.values() for seconds in profile.values())
    assert "0.up  64 x 32, 16 tokens, float32" in record.meta["plans"][training.BOTH]
    training.show([record], Console(width=200))
    shown = capsys.readouterr().out
    assert "2:4 all three" in shown and re.search(r"both ways, packed: weights and state 0\.5\d of dense", shown)
    pytest.importorskip("matplotlib", reason="needs requirements/figures.txt")
    import figures

    monkeypatch.setattr(figures, "TRACKED", tmp_path)
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    measure.save([record], tmp_path / "training-float32-here.json")
    (drawn,) = figures.draw("here")
    assert drawn.name == "training-here.svg" and "weight gradient" in drawn.read_text()


def test_training_steps_of_a_net_of_convolutions(cases, monkeypatch, capsys: pytest.CaptureFixture[str]):
    from cases import training

    monkeypatch.setattr(training, "IMAGES_WIDTH", 8)
    (cell,) = training.image_cells(["float32"], 2)
    compiled = {training.COMPILED, training.SDGP_COMPILED, training.BOTH_COMPILED}
    record = training.Bench(0.01, [*compiled])(cell)
    assert set(record.timings) == {*training.IMAGES_DENSE, *training.IMAGES_SPARSE} - compiled
    assert set(record.baseline) == {training.EAGER, training.LAST}
    assert set(record.meta["parts"]) == {*training.IMAGES_SPARSE} - compiled
    assert "wide.0  16 x 200, 512 tokens, float32" in record.meta["plans"][training.SDGP]
    training.show([record], Console(width=200))
    assert "SDGP, contiguous" in capsys.readouterr().out


@pytest.mark.long
def test_a_repetition_trains_every_arm_on_the_same_batches(cases, monkeypatch, capsys: pytest.CaptureFixture[str]):
    from cases import repetition

    task = repetition.task_of("cifar10")
    task.__dict__["test"] = tuple(part[:100] for part in task.test)
    monkeypatch.setattr(repetition, "task_of", lambda name: task)
    monkeypatch.setattr(repetition, "TRIAL", 1)
    monkeypatch.setattr(repetition, "SLICE", 1)
    begun: list[tuple[str, int]] = []
    monkeypatch.setattr(repetition.Progress, "begin", lambda self, title, total, *_: begun.append((title, total)))
    (cell,) = repetition.cells(["cifar10"], ["float32"], 1, {"cifar10": 300})
    record = repetition.Bench([repetition.COMPILED], "magnitude")(cell)
    steps = ("training every arm in turns, steps", 2 * 4)
    assert [one for one in begun if "measuring" not in one[0]][1:] == [steps, ("judging the arms", 4)]
    arms = repetition.DENSE, repetition.MASKED, repetition.BOTH, repetition.SPARSE_GRADIENT
    assert set(record.timings) == {*arms}
    assert record.meta["steps"] == 2 and record.baseline == (repetition.DENSE,)
    assert all(0 <= value <= 100 for value in record.meta["metric"].values())
    repetition.show([record], Console(width=200))
    assert "2:4, SDGP, eager" in capsys.readouterr().out
    with pytest.raises(DataError, match="mnist"):
        repetition.cells(["mnist"], ["float32"], 1, {})


@pytest.mark.long
def test_permutation_writes_efficacy_beside_times(tmp_path: Path):
    out = tmp_path / "r.json"
    done = suite("permutation", "--sizes", "128x64,16x32", "--seconds", "0.02", "--json", str(out))
    assert done.returncode == 0, done.stderr
    golden, small = measure.load(out)
    assert golden.meta["efficacy of windows of 8"] == pytest.approx(0.355, abs=1e-3)
    assert list(golden.timings) == ["windows of 8", "100 escapes", "windows of 12"]
    assert list(small.timings) == ["default"] and small.machine["cpu"]
