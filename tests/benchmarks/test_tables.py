"""What the benchmarks show of their records: tables, figures, the README's part, and two checkouts side by side."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.benchmarks.suite import ROOT, record
from twofour import measure
from twofour.errors import DataError


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


def test_tables_of_operations(cases):
    import operation_tables as tables
    from cases import bits, bits_nets, blocks

    recurrent = record({"torch": 4e-6, "ORT": 2e-6, "ours": 1e-6}, ("torch", "ORT"), model="gru", shape="16", tokens=2)
    assert "| gru 16 x 2 | 2.0 (0.50) | 1.0 (1.00) | 0.5 (2.00) |" in tables.of_recurrent([recurrent])
    of_block = {"shape": "16x16", "pattern": "block:4x4@0.5", "weights": "hot", "dtype": "float32"}
    times = {"F.linear": 6e-6, "torch CSR": 9e-6, "block_matmul_f32_rows__scalar": 3e-6}
    shown = tables.of_block([record(times, ("F.linear",), **of_block, tokens=tokens) for tokens in (64, 1)])
    assert "| weight, pattern | 1 tokens, hot | 64 tokens, hot |" in shown and "| 2.00 (3.0) | 2.00 (3.0) |" in shown
    fused = {blocks.EAGER: 4e-3, blocks.INDUCTOR: 1e-3, blocks.OURS: 2e-3}
    shown = tables.of_fused([record(fused, (blocks.EAGER,), model="gelu", shape="4x4")])
    assert "| gelu, 4x4 | 4.00 | 1.00 | 2.00 | 2.00 | 0.50 |" in shown and "**2.00** | **0.50**" in shown
    times = {bits.BYTES: 4e-6, bits.INT_MM: 8e-6, "bits_matmul_planes__scalar": 1e-6, "bits_matmul_bytes__scalar": 2e-6}
    of_bits = {"shape": "10x50", "weights": "cold", "tokens": 1, "dtype": "w1a1"}
    assert "| w1a1 | 4.00 (planes, 1 GOP/s) |" in tables.of_bits([record(times, (bits.BYTES, bits.INT_MM), **of_bits)])
    peers = {"ONNX Runtime MatMulNBits": 3e-6, "llama.cpp TQ1_0": 5e-6, "llama.cpp TQ2_0": 2e-6}
    shown = tables.of_bits([record(times | peers, (bits.BYTES,), **of_bits)])
    assert "| w1a1 | 4.00 (planes, 1 GOP/s, MatMulNBits 3.00, llama.cpp 2.00) |" in shown
    times = {bits_nets.OURS: 2e-3, bits_nets.INT8: 3e-3, bits_nets.FLOAT: 9e-3}
    shown = tables.of_nets([record(times, (bits_nets.INT8,), model="vgg", dtype="w1a1", batch=8)])
    assert "| vgg, w1a1, 8 | 2.00 | 3.00 | 9.00 | 1.50 | 4.50 |" in shown


def test_tables_of_models_in_use(cases):
    import use_tables as tables

    scores = {"torch": 82.0, "twofour 2:4 int8": 81.5}
    times = {"torch": 2.0, "twofour 2:4 int8": 0.25}
    shown = tables.of_embeddings([record(times, ("torch",), sentences="stsb", count=512, spearman=scores)])
    assert "| twofour 2:4 int8 | 2048 (8.00) | 81.50 |" in shown
    times = {"torch eager": 2.0, "twofour graphs": 0.5}
    shown = tables.of_generate([record(times, ("torch eager",), model="gpt2", dtype="float32", new=32)])
    assert "| gpt2, float32, 1 thread | 16.0 (1.00) | 64.0 (4.00) |" in shown
    times = {"OpenVINO": 8e-3, "twofour dense": 4e-3}
    shown = tables.of_ragged([record(times, ("OpenVINO",), lengths="mixed", tokens=41, places=100)])
    assert "| mixed, 41% | 8.0 (1.00) | 4.0 (0.50) |" in shown
    times = {"OpenVINO": 8e-3, "twofour dense": 8e-3, "twofour shrunk": 5e-3}
    shown = tables.of_shrunk([record(times, (), model="a", budget=0.6, promised=0.61)])
    assert "| a, 0.6 | 8.000 | 8.000 | 5.000 | - | 0.610 | 0.625 | - |" in shown


def test_two_cells_never_share_a_record(cases, tmp_path: Path):
    cells = [{"case": "a", "unknown": 1}, {"case": "a", "unknown": 2}]
    with pytest.raises(DataError, match="two cells would share one record"):
        cases["records"].run(cells, lambda cell: pytest.fail("nothing is measured"), tmp_path / "a.json", resume=False)


def test_machines_of_operations_are_not_named_by_a_part_of_a_case(cases, monkeypatch, tmp_path: Path):
    import figures

    for name in ("bits-a-cpu-1", "bits-nets-a-cpu-1", "blocks-float32-b-cpu-2", "linear-int8-c-cpu-3"):
        (tmp_path / f"{name}.json").write_text("{}")
    monkeypatch.setattr(figures, "TRACKED", tmp_path)
    assert figures.recorded(("bits", "bits-nets", "blocks-float32")) == ["a-cpu-1", "b-cpu-2"]


def test_grid_says_where_compile_is_slower_than_dense(cases, capsys: pytest.CaptureFixture[str]):
    grid, shapes = cases["grid"], [cases["shapes"].Shape("a", 64, 32)]
    records = list(map(grid.Bench(0.01), grid.cells(shapes, [1, 4], [1], 2, "float32")))
    assert [record.meta["tokens"] for record in records] == [1, 4]
    libraries = {name for name in records[0].timings if not name.startswith("dense_matmul_f32_panels__")}
    assert libraries - {"MKL prepacked"} == {"F.linear", "oneDNN prepacked", grid.COMPILED}
    times = {"dense": measure.Timing(*(1e-3,) * 4, 5, 1), grid.COMPILED: measure.Timing(*(1.2e-3,) * 4, 5, 1)}
    meta = {"case": "grid", "shape": "64x32", "tokens": 4, "example": 2}
    for noise, expected in ((0.01, 0.2), (0.3, None)):
        record = measure.Record(times, ("dense",), noise=noise, meta=meta, machine=measure.machine())
        assert grid.slower(record) == (expected and pytest.approx(expected))
        grid.show([record], Console(width=200))
        assert ("64x32 at 4 tokens, 1 threads: 20.0% slower" in capsys.readouterr().out) == (expected is not None)


def test_figures_are_drawn_from_records(cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib", reason="needs requirements/figures.txt")
    import figures

    timing = measure.Timing(2e-3, 1e-3, 3e-3, 1e-3, 5, 1)
    times = {"F.linear": timing, "nm_matmul_2x4_f32_rows__avx512": timing}
    made = [
        measure.Record(times, ("F.linear",), meta={"case": "linear", "tokens": n}, machine=measure.machine())
        for n in (1, 8)
    ]
    model = {"case": "models", "model": "tiny", "batch": 1}
    records = [
        measure.Record(
            {"OpenVINO": timing, "twofour 2:4": timing}, ("OpenVINO",), meta=model, machine=measure.machine()
        )
    ]
    measure.save(made, tmp_path / "linear-float32-here.json")
    measure.save(records, tmp_path / "models-float32-here.json")
    monkeypatch.setattr(figures, "TRACKED", tmp_path)
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    assert figures.machines() == ["here"]
    drawn = figures.draw("here")
    assert [path.name for path in drawn] == ["linear-hot-here.svg", "models-float32-here.svg"]
    first = [path.read_text() for path in drawn]
    assert "geometric mean" in first[0] and "twofour 2:4" in first[1]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{figures.START}\nold\n{figures.END}\nafter\n")
    monkeypatch.setattr(figures, "PAGE", page)
    for _ in range(2):  # nothing but the records decides what is drawn and written
        figures.draw_all()
        assert [path.read_text() for path in drawn] == first
        shown = page.read_text()
        assert shown.startswith("before\n") and shown.endswith("after\n") and "old" not in shown
        assert (
            "| float32 | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) |" in shown and "`docs/figures/*-here.svg`" in shown
        )
        assert "| tiny, None | 1 | 1 |" in shown
        assert shown.count("Measured on: ") == 2  # under each of the two tables


def test_the_readme_is_written_from_the_records(cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import readme

    page, results = readme.PAGE.read_text(), (readme.ROOT / "docs" / "results.md").read_text()
    monkeypatch.setattr(readme, "PAGE", tmp_path / "README.md")
    readme.PAGE.write_text(page)
    assert readme.write().read_text() == page, "run `make figures`"
    assert "| MiniLM-L6 | 0.46 ± 0.24 of" in page and "-0.46 ± 0.24" in results  # two programs, one interval
    assert "| ResNet-50 | not measured (random weights) |" in page
    pytest.importorskip("matplotlib", reason="needs requirements/figures.txt")
    kept = readme.FIGURE.read_text()
    monkeypatch.setattr(readme, "FIGURE", tmp_path / "models.svg")
    labels = re.findall(r">(\d+\.\d)<", readme.draw().read_text())
    assert labels == re.findall(r">(\d+\.\d)<", kept) and len(labels) >= 2 * 3 * 4


def test_two_checkouts_are_compared_cell_by_cell(cases, monkeypatch, capsys: pytest.CaptureFixture[str]):
    """Ours apart from the control, the least of the rounds, and only what both have."""
    import versions

    cell = ("linear", "64x32", 4)
    ours, theirs = (*cell, "nm_matmul_2x4_f32_panels__avx512"), (*cell, "oneDNN prepacked")
    assert versions.is_ours(ours[-1]) and versions.is_ours("compiled") and versions.is_ours("twofour 2:4")
    assert not any(map(versions.is_ours, (theirs[-1], "F.linear", "dense_matmul_f32_prepacked__onednn")))

    old = [{ours: 2.0, theirs: 1.0, (*cell, "gone__avx2"): 1.0}] * 3
    new = [{ours: seconds, theirs: 1.0} for seconds in (4.0, 3.0, 99.0)]
    found = versions.ratios(old, new)
    assert found == {ours: 1.5, theirs: 1.0}
    versions.show(found, Console(width=160))
    text = capsys.readouterr().out
    assert "ours: new / old 1.500 over 1 cells" in text and "control: new / old 1.000 over 1 cells" in text
    elsewhere = ("linear", "8x8", 1, ours[-1])  # where there is no control
    assert versions.beside_control({ours: 1.5, theirs: 1.2, elsewhere: 9.0}) == {ours: pytest.approx(1.25)}


@pytest.mark.long
@pytest.mark.parametrize("suite", [("conv", "--nonsense"), ("mask", "--threads", "1", "--seconds", "0.02")])
def test_versions_runs_the_suites_of_both(tiny: Path, suite: tuple[str, ...], tmp_path: Path):
    """A checkout against itself: its venv's Python, its benchmarks."""
    checkout = tmp_path / "checkout"
    (checkout / ".venv" / "bin").mkdir(parents=True)
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (checkout / "benchmarks").symlink_to(ROOT)
    words = [*suite, "--shapes", str(tiny)] if suite[0] == "mask" else suite
    command = [sys.executable, str(ROOT / "versions.py"), "--rounds", "1", str(checkout), str(checkout), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if suite[0] == "mask":
        assert done.returncode == 0 and "new / old" in done.stdout, done.stderr
    else:
        assert done.returncode and "No such option" in done.stderr, done.stderr
