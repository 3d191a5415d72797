"""`twofour simulate`: SCALE-Sim's files in, its reports out; stepping; refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.small import refused

CASES = json.loads((Path(__file__).parent.parent / "hardware" / "systolic" / "scalesim.json").read_text())["cases"]


@pytest.fixture
def files(run):
    case = next(case for case in CASES if case["name"] == "gemm N:M ws")
    Path("run.cfg").write_text(case["config"])
    Path("layers.csv").write_text(case["topology"])
    return case


def test_reports_and_stepping(run, files):
    done = run("simulate", "run.cfg", "layers.csv", "-p", "out", "--step", "--json", "out.json")
    assert done.exit_code == 0, done.output
    assert "16 x 16 x 16 (2:4)" in done.stdout and "every product exact, 517 cycles" in done.stdout
    assert "511 cycles in all" in done.stdout and "the number of its last cycle, counted from 0" in done.stdout
    folder = Path("out/gemm_N:M_ws")
    assert {path.name: path.read_text() for path in folder.iterdir()} == files["reports"]
    content = json.loads(Path("out.json").read_text())
    assert [row["cycles"] for row in content["layers"]] == [75, 135, 86, 123, 29, 63]
    assert content["array"] == {"rows": 8, "columns": 8, "dataflow": "ws"}


@pytest.mark.parametrize(
    ("key", "said"), [("SparsitySupport", "SparsitySupport is not"), ("both", "each filter draws")]
)
def test_a_ratio_that_does_not_count_is_not_shown(run, files, key: str, said: str):
    config = re.sub(r"(?m)^(SparsitySupport\s*:).*$", r"\1 " + str(key == "both"), files["config"])
    Path("run.cfg").write_text(re.sub(r"(?m)^(OptimizedMapping\s*:).*$", r"\1 True", config))
    done = run("simulate", "run.cfg", "layers.csv", "-p", "out")
    assert done.exit_code == 0, done.output
    assert "16 x 16 x 16 " in done.stdout and "(2:4)" not in done.stdout and done.stdout.count("ignored") == 1
    assert said in done.stdout


def test_a_product_without_rows(run, files):
    Path("layers.csv").write_text("Layer, M, N, K,\ng1, 0, 16, 32,\n")
    refused(run("simulate", "run.cfg", "layers.csv"), "the layer `g1` cannot exist", "got     M=0")


def test_refusals(run, files):
    refused(run("simulate", "layers.csv", "layers.csv"), "is no configuration that can be simulated")
    refused(run("simulate", "run.cfg", "run.cfg"), "is no topology")
    refused(run("simulate", "run.cfg", "layers.csv", "-i", "conv"), "line 2")
    Path("results").write_text("mine")
    refused(run("simulate", "run.cfg", "layers.csv"), "cannot be written", "--out")
    assert Path("results").read_text() == "mine"
