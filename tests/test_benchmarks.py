"""The benchmark suite runs, writes records with their machine, resumes, and refuses wrong kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from twofour import measure, patterns
from twofour.errors import DataError, MeasureError

ROOT = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch):
    """Import benchmarks/cases as `python benchmarks/run.py` does."""
    monkeypatch.syspath_prepend(str(ROOT))
    from cases import linear, mask, records, shapes, table

    yield {"linear": linear, "mask": mask, "records": records, "shapes": shapes, "table": table}
    for name in [name for name in sys.modules if name.split(".")[0] == "cases"]:
        del sys.modules[name]


def suite(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "run.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.txt"
    path.write_text("# name out in\na 64 32\n\nb 32 64 # comment\n")
    return path


def test_linear_writes_records_and_a_table(tiny: Path, tmp_path: Path):
    out = tmp_path / "r.json"
    words = ("linear", "--shapes", str(tiny), "--threads", "1", "--tokens", "1,4", "--hot", "--seconds", "0.02")
    done = suite(*words, "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "float32, 1 thread, weights hot: best dense / best 2:4" in done.stdout
    assert "geomean" in done.stdout and "torch" in done.stdout
    found = measure.load(out)
    assert [(r.meta["shape"], r.meta["tokens"]) for r in found] == [
        ("64x32", 1), ("64x32", 4), ("32x64", 1), ("32x64", 4),
    ]  # fmt: skip
    for record in found:
        assert record.baseline == ("F.linear", "oneDNN prepacked") and set(record.baseline) < set(record.timings)
        assert (record.clock, record.threads, record.weights) == ("thread", 1, "hot")
        assert record.machine["cpu"] and record.noise is not None
    before = [record.created for record in found]
    again = suite(*words[:-1], "0.02", "--json", str(out), "--resume")
    assert again.returncode == 0 and [record.created for record in measure.load(out)] == before


def test_mask_writes_records(tiny: Path, tmp_path: Path):
    out = tmp_path / "m.json"
    done = suite("mask", "--shapes", str(tiny), "--threads", "1,2", "--seconds", "0.02", "--json", str(out))
    assert done.returncode == 0, done.stderr
    for column in ("mask/copy", "compress/copy", "mask/clone", "compress/clone", "topk/mask"):
        assert column in done.stdout
    assert "2 threads, geometric means: mask/copy " in done.stdout
    assert all(
        set(r.timings) == {"2:4 mask", "2:4 compress", "copy_", "clone", "torch.topk"} for r in measure.load(out)
    )
    assert [(r.meta["shape"], r.threads, r.clock) for r in measure.load(out)][:2] == [
        ("64x32", 1, "thread"), ("64x32", 2, "wall"),
    ]  # fmt: skip


def test_errors_are_in_their_form():
    done = suite("linear", "--shapes", "nowhere.txt")
    assert done.returncode == 2
    assert "DataError: there is no list of shapes 'nowhere.txt'" in done.stderr and "kernels.txt" in done.stderr


def test_every_list_of_shapes_reads(cases, tmp_path: Path):
    convolutions = cases["shapes"].CONVOLUTIONS
    for path in sorted((ROOT / "shapes").glob("*.txt")):
        read = cases["shapes"].read_convolutions if path.name in convolutions else cases["shapes"].read
        assert read(path.name)
    assert len({shape.text for shape in cases["shapes"].read_all()}) == len(cases["shapes"].read_all()) >= 10
    assert cases["shapes"].read_convolutions("resnet50.txt")[1].text == "64x64x3x3/1 @56x56"
    assert [shape.text for shape in cases["shapes"].read("kernels.txt")] == [
        "384x384", "1536x384", "768x768", "3072x768", "4096x4096", "11008x4096",
    ]  # fmt: skip
    bad = tmp_path / "bad.txt"
    bad.write_text("a 64\n")
    with pytest.raises(DataError, match=r"bad\.txt:1 is malformed(.|\n)*a 64(.|\n)*name out in"):
        cases["shapes"].read(str(bad))


def test_a_wrong_kernel_is_not_timed(cases):
    linear = cases["linear"]
    layer = linear.Layer.of(cases["shapes"].Shape("a", 64, 32))
    x = torch.randn(4, 32)
    right = torch.nn.functional.linear(x, layer.weight, layer.bias)
    for dtype, factor in (("float32", 1.001), ("bfloat16", 1.02), ("int8", 1.1), ("int4", 1.5)):
        linear._verify(layer, dtype, x, {"right": lambda: right})
        with pytest.raises(MeasureError, match=r"wrong is wrong and is not timed(.|\n)*64x32"):
            linear._verify(layer, dtype, x, {"wrong": lambda factor=factor: right * factor})
        with pytest.raises(MeasureError):
            linear._verify(layer, dtype, x, {"nan": lambda: right * float("nan")})


def test_cold_cells_rotate_over_copies(cases):
    linear = cases["linear"]
    layer = linear.Layer.of(cases["shapes"].Shape("a", 64, 32))
    candidates = linear._candidates(layer, "float32", torch.randn(1, 32), 5)
    assert {len(calls) for calls in candidates.values()} == {5}
    for layout in layer.layouts.values():
        if not layout[0].is_mkldnn:
            assert len({tensor.data_ptr() for tensor in layout}) == len(layout)
    assert any(name.startswith("nm_matmul_") for name in candidates)


def test_records_without_compress_are_still_shown(cases, capsys: pytest.CaptureFixture[str]):
    timing = measure.Timing(2e-3, 1e-3, 3e-3, 1e-3, 5, 1)
    names = ("2:4 mask", "copy_", "clone", "torch.topk")
    meta = {"case": "mask", "shape": "64x32"}
    old = measure.Record(dict.fromkeys(names, timing), ("copy_",), meta=meta, machine=measure.machine())
    cases["table"].show_mask([old], Console(width=200))
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("64x32"))
    assert row.split() == [
        "64x32",
        "1",
        "2.000",
        "-",
        "2.000",
        "2.000",
        "2.000",
        "1.00",
        "-",
        "1.00",
        "-",
        "1.00",
        "0.0",
    ]


def test_a_wrong_mask_or_packed_weight_is_not_timed(cases, monkeypatch: pytest.MonkeyPatch):
    mask, weight = cases["mask"], torch.randn(16, 32)
    mask.verify(weight)
    right = mask.compress(weight)
    monkeypatch.setattr(mask, "compress", lambda w: (right[0], right[1], right[2] ^ 1))
    with pytest.raises(MeasureError, match="2:4 compress is wrong and is not timed"):
        mask.verify(weight)
    monkeypatch.setattr(mask, "by_topk", lambda w: torch.zeros(w.shape, dtype=torch.bool))
    with pytest.raises(MeasureError, match="2:4 mask is wrong and is not timed"):
        mask.verify(weight)


def test_the_common_mask_is_ours(cases):
    weight = torch.randn(16, 32)
    assert torch.equal(cases["mask"].by_topk(weight), patterns.parse("2:4").project(weight, absolute=True))
