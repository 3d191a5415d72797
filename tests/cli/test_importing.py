"""`twofour import` on the checkpoints of tests/data/importing."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import twofour
from tests.cli.small import refused
from tests.importing.small import DATA, sparse
from twofour import importing


def test_a_folder_becomes_plain_weights_that_check_accepts(run):
    result = run("import", str(DATA / "bitmask_float8"), "--out", "out", "--json", "r.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("sparse-24-bitmask: 2 sparse weights of ")
    assert "2 scales of activations are left out" in result.stdout
    weights, want = load_file("out/model.safetensors"), load_file(DATA / "bitmask_float8" / "expected.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in want.items())
    assert run("check", "out/model.safetensors").exit_code == 0
    report = json.loads(Path("r.json").read_text())
    assert report["format"] == "sparse-24-bitmask" and report["ok"]
    assert "quantization_config" not in json.loads(Path("out/config.json").read_text())
    assert importing.decode("out").patterns == {"fc1.weight": "2:4", "fc2.weight": "2:4"}


def test_packed_weights_load_in_their_own_type(run):
    assert run("import", str(DATA / "bitmask_int8"), "--packed", "--out", "out").exit_code == 0
    model = nn.ModuleDict({"fc1": nn.Linear(36, 64), "fc2": nn.Linear(64, 48, bias=False), "head": nn.Linear(48, 10)})
    fast = twofour.load("out/model.safetensors", model, tokens=(2,), memory="small")
    assert fast.plan.dtype == "int8"
    assert run("check", "out/model.safetensors").exit_code == 0


def test_tied_tensors_of_a_state_dict_are_both_written(run):
    weight = sparse(16, 32)
    torch.save({"a.weight": weight, "b.weight": weight, "c.weight": torch.randn(8, 16)}, "m.pt")
    assert run("import", "m.pt", "--out", "out").exit_code == 0
    found = load_file("out/model.safetensors")
    assert torch.equal(found["a.weight"], weight) and torch.equal(found["b.weight"], weight)


def test_refusals_name_the_cause_and_leave_no_folder(run):
    save_file({"a.weight": torch.randn(16, 32)}, "dense.safetensors")
    refused(run("import", "dense.safetensors", "--out", "out"), "FormatError", "no sparse weight")
    refused(run("import", "dense.safetensors", "--out", "out", "--format", "x"), "is not known", "marlin-24")
    refused(run("import", str(DATA / "marlin_24"), "--out", str(DATA / "marlin_24" / "x")), "inside the source")
    assert not Path("out").exists()
