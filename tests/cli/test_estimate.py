"""`twofour estimate`: each way to name the input, the JSON, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cli.small import refused


def test_rows_of_each_linear_layer(run):
    done = run("estimate", "zoo_cli:small", "--machine", "h100-pcie", "--batch", "4096", "--json", "out.json")
    assert done.exit_code == 0, done.output
    assert "no input was given" in done.stdout and "4096 x 128 x 64" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("h100-pcie, bfloat16: ")
    content = json.loads(Path("out.json").read_text())
    assert [row["layer"] for row in content["rows"]] == ["0", "2", "3"] and content["batch"] == 4096
    assert {"dense_ms", "sparse_ms", "bound", "ratio"} <= set(content["rows"][0])


def test_an_input(run):
    done = run("estimate", "zoo_cli:small", "--machine", "a100-sxm", "--batch", "8", "--input", "64", "--dtype", "int8")
    assert done.exit_code == 0, done.output
    assert "8 x 128 x 64" in done.stdout and "everything else" in done.stdout
    assert "sparse does not pay in: 0, 2" in done.stdout


def test_a_training_step(run):
    small = ("estimate", "zoo_cli:small", "--machine", "h100-pcie", "--training")
    done = run(*small, "--batch", "4096", "--input", "64", "--optimizer", "sgd", "--json", "out.json")
    assert done.exit_code == 0, done.output
    for said in ("4096 x 64 x 128", "weight gradient", "the dense step", "both ways", "not priced: the loss", "sgd: a"):
        assert said in done.stdout, said
    content = json.loads(Path("out.json").read_text())
    assert content["dense_ms"] > 0 and len(content["rows"]) == 8  # the first layer's input needs no gradient
    refused(run(*small), "a training step needs an example", "--input")
    refused(run(*small, "--input", "64", "--plot", "out.svg"), "--plot")
    refused(run(*small[:-1], "--input", "64", "--optimizer", "adamw"), "--optimizer", "an optimiser is of a")
    refused(run(*small, "--input", "64", "--optimizer", "lion"), "the optimiser 'lion' is unknown")


def test_layers_of_low_bits_have_a_column(run):
    done = run("estimate", "zoo_cli:coded", "--machine", "b200")
    assert done.exit_code == 0, done.output
    assert "low bits ms" in done.stdout
    rows = [line for line in done.stdout.splitlines() if re.match(r"[023] ", line)]
    assert [bool(re.search(r"launch +0\.\d{4} w2a8 ", row)) for row in rows] == [True, True, False]
    assert re.search(r"launch +- ", rows[2])
    assert "Blackwell has no 1-bit units" in done.stdout
    assert "low bits" not in run("estimate", "zoo_cli:small", "--machine", "b200").stdout


def test_types_without_a_sparse_unit_are_not_offered(run):
    shown = " ".join(run("estimate", "--help").output.split())
    assert "tf32" in shown and "float32" not in shown
    refused(
        run("estimate", "zoo_cli:small", "--machine", "h200", "--dtype", "float32"),
        *("no 2:4 matrix unit for float32", 'dtype="tf32"'),
    )


def test_refusals(run):
    refused(run("estimate", "zoo_cli:small", "--machine", "a1000"), "the machine 'a1000' is unknown", "a100-pcie")
    refused(run("estimate", "zoo_cli:small", "--machine", "h200", "--dtype", "int4"), "no dense matrix unit for int4")
    refused(run("estimate", "zoo_cli:small", "--machine", "h200", "--input", "64", "--length", "8"), "--length")
    refused(run("estimate", "zoo_cli:small", "--machine", "h200", "--input", "3by4"), "--input")
    refused(run("estimate", "zoo_cli:broken", "--machine", "h200", "--plot", "e.foo"), "e.foo cannot be drawn", ".svg")
    refused(
        run("estimate", "zoo_cli:small", "--machine", "h200", "--input", "65"),
        "does not run on the shapes",
        "--batch rows",
    )


def test_a_recurrent_model_of_ids_is_named_or_followed_with_data(run):
    done = run("estimate", "zoo_cli:tagger", "--machine", "a100-sxm", "--json", "out.json")
    assert done.exit_code == 0 and "left out of all figures: 1" in done.stdout, done.output
    assert json.loads(Path("out.json").read_text())["left_out"] == ["1"]
    assert "without 1: they are priced with an example" in done.stdout.splitlines()[-1]
    for given in (("--data", "zoo_cli:ids"), ("--length", "6", "--batch", "2")):
        done = run("estimate", "zoo_cli:tagger", "--machine", "a100-sxm", *given)
        assert done.exit_code == 0 and "left out" not in done.stdout, done.output
        assert re.search(r"^1 +12 +2 x 64 x 16 ", done.stdout, re.MULTILINE), (
            done.output
        )  # two products in each of six steps
    refused(run("estimate", "zoo_cli:tagger", "--machine", "h200", "--data", "zoo_cli:ids", "--length", "8"), "--data")
