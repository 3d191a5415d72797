"""`twofour export`: to plain safetensors, ONNX and Hugging Face folders, from each kind of source."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import twofour
from tests.cli.small import refused

MORE = """
import torch
import twofour
import zoo_cli

def pruned():
    return twofour.prune(zoo_cli.small().eval(), "2:4")

def inputs():
    return [torch.randn(4, 64, generator=torch.Generator().manual_seed(0))]
"""


@pytest.fixture
def zoo(run, monkeypatch: pytest.MonkeyPatch):
    """Run a command where zoo_more:pruned is a masked model."""
    Path("zoo_more.py").write_text(MORE)
    monkeypatch.syspath_prepend(Path.cwd())
    yield run
    sys.modules.pop("zoo_more", None)


def test_a_packed_file_becomes_a_plain_one(zoo) -> None:
    zoo_more = importlib.import_module("zoo_more")
    model = zoo_more.pruned()
    twofour.save(model, "packed.safetensors")
    result = zoo(
        "export", "packed.safetensors", "--to", "safetensors", "--out", "plain.safetensors", "--json", "r.json"
    )
    assert result.exit_code == 0, result.output
    plain = load_file("plain.safetensors")
    assert all(torch.equal(plain[name], tensor) for name, tensor in model.state_dict().items())
    assert sorted(json.loads(Path("r.json").read_text())["sparse"]) == ["0.weight", "2.weight"]
    assert zoo("check", "plain.safetensors").exit_code == 0
    back = twofour.load("plain.safetensors", zoo_more.zoo_cli.small(), masked=True)
    assert twofour.masks.of(back).keys() == twofour.masks.of(model).keys()
    refused(zoo("export", "packed.safetensors", "--to", "safetensors", "--out", "plain.safetensors"), "exists already")
    again = zoo("export", "zoo_more:pruned", "--to", "safetensors", "--out", "plain.safetensors", "--force")
    assert again.exit_code == 0 and load_file("plain.safetensors").keys() == plain.keys()


def test_onnx_from_a_function_and_from_a_file_with_its_model(zoo) -> None:
    pytest.importorskip("onnxruntime", reason="the extra [onnx] is not installed")
    pytest.importorskip("onnxscript", reason="the extra [onnx] is not installed")
    zoo_more = importlib.import_module("zoo_more")
    twofour.save(zoo_more.pruned(), "packed.safetensors")
    words = ("--to", "onnx", "--input", "64", "--out", "small.onnx", "--json", "r.json")
    result = zoo("export", "packed.safetensors", "--model", "zoo_cli:small", *words)
    assert result.exit_code == 0, (result.output, result.stderr)
    said = json.loads(Path("r.json").read_text())
    assert said["error"] < 1e-4 and [weight["axis"] for weight in said["weights"]] == [1, 1]
    assert "2 sparse weights" in result.stdout and Path("small.onnx").is_file()
    refused(zoo("export", "zoo_more:pruned", "--to", "onnx", "--out", "x.onnx"), "--input SHAPE or --data DATA")
    refused(
        zoo("export", "zoo_more:pruned", "--to", "onnx", "--out", "x.onnx", "--dtype", "int8", "--input", "64"),
        "int8 takes data",
    )
    assert not Path("x.onnx").exists()


def test_a_folder_of_hugging_face_with_card_and_note(zoo) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [text] is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=96))
    model.save_pretrained("dense")
    Path("dense/README.md").write_text("the dense model's card")
    assert zoo("prune", "dense", "--out", "pruned").exit_code == 0
    Path("accuracy.json").write_text('{"metric": "Spearman, %", "sparse": 81.5, "dense": 82.0, "control": 82.1}')
    result = zoo("export", "pruned", "--to", "huggingface", "--out", "hub", "--accuracy", "accuracy.json")
    assert result.exit_code == 0, (result.output, result.stderr)
    card = Path("hub/README.md").read_text()
    for text in ("`2:4` | 7", "control) | 82.1", "| this model | 81.5", "Spearman, %", 'criterion = "magnitude"'):
        assert text in card, (text, card)
    assert Path("hub/README.base.md").is_file()
    config = json.loads(Path("hub/config.json").read_text())
    assert config["twofour"]["patterns"] == {"2:4": 7}
    with safe_open("hub/model.safetensors", framework="pt") as file:
        assert len(json.loads(file.metadata()["twofour.patterns"])) == 7 and file.metadata()["format"] == "pt"
    ids = torch.arange(8).unsqueeze(0)
    want = transformers.BertModel.from_pretrained("pruned").eval()(ids).last_hidden_state
    loaded = transformers.BertModel.from_pretrained("hub").eval()
    assert torch.equal(loaded(ids).last_hidden_state, want)
    assert zoo("check", "hub").exit_code == 0
    refused(zoo("export", "pruned", "--to", "huggingface", "--out", "hub"), "exists already")
    assert not [path for path in Path().iterdir() if path.name.startswith(".hub")]


def test_what_cannot_be_exported_is_refused(zoo) -> None:
    assert zoo("export", "zoo_more:pruned", "--to", "gguf", "--out", "x").exit_code == 2
    twofour.save(importlib.import_module("zoo_more").zoo_cli.small(), "dense.safetensors")
    words = ("--to", "onnx", "--out", "x.onnx", "--input", "64")
    refused(
        zoo("export", "dense.safetensors", "--model", "zoo_cli:small", *words), "does not say which", "--pattern 2:4"
    )
    refused(zoo("export", "zoo_more:pruned", "--to", "huggingface", "--out", "x"), "only models of transformers")
    refused(zoo("export", "dense.safetensors", *words), "the layers they belong to are not known")
    Path("lie.json").write_text('{"sparse": "x"}')
    refused(zoo("export", "dense.safetensors", "--to", "huggingface", "--out", "x", "--accuracy", "lie.json"), "layers")
