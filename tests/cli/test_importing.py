"""`twofour import` on the checkpoints of tests/data/importing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import twofour
from tests.cli.small import refused
from tests.importing.small import DATA, bitmask_parts, sparse
from twofour import importing, masks


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


def test_an_orphaned_language_model_loads_in_transformers_again(run):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra [text])")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=48, tie_word_embeddings=True, **sizes)
    model = twofour.prune(transformers.LlamaForCausalLM(config), "2:4")
    model.save_pretrained("old")
    state = load_file("old/model.safetensors")
    for name in masks.of(model):
        parts = bitmask_parts(state.pop(name))
        state |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    save_file(state, "old/model.safetensors", {"format": "pt"})
    described = json.loads(Path("old/config.json").read_text())
    sparsity = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}
    described["quantization_config"] = {"quant_method": "compressed-tensors", "sparsity_config": sparsity}
    Path("old/config.json").write_text(json.dumps(described))

    assert run("import", "old", "--out", "new").exit_code == 0
    back = transformers.LlamaForCausalLM.from_pretrained("new")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in back.state_dict().items())
    assert run("check", "new").exit_code == 0
    empty = transformers.LlamaForCausalLM(config)
    assert len(masks.of(twofour.read("old", empty))) == 7
    ids = torch.arange(8).view(1, 8)
    torch.testing.assert_close(empty(ids).logits, model(ids).logits)
