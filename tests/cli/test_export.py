"""`twofour export`: to plain safetensors, ONNX and Hugging Face folders, from each kind of source."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import twofour
from tests.cli.small import refused
from twofour import quantization
from twofour.cli import source as sources
from twofour.cli import sparse

MORE = """
import torch
import twofour
import zoo_cli

def pruned():
    return twofour.prune(zoo_cli.small().eval(), "2:4")

def quarter():
    return twofour.prune(zoo_cli.small().eval(), "1:4")

def both_ways():
    return twofour.prune(zoo_cli.small().eval(), "2:4-transposable")

def forgotten():
    model = pruned()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    return model

def low_bits():
    return twofour.quantize(small_floats().eval(), "w4", "a8")

def small_floats():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))

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
    refused(zoo("export", "zoo_more:pruned", "--to", "onnx", "--out", "x.onnx", "--opset", "99"), "--opset")
    refused(
        zoo("export", "zoo_more:pruned", "--to", "onnx", "--out", "x.onnx", "--dtype", "int8", "--input", "64"),
        "--dtype int8 takes data",
        "--data DATA",
    )
    wide = zoo("export", "zoo_more:pruned", "--to", "onnx", "--out", "x.onnx", "--input", "65")
    refused(wide, "the model does not run on the example", "2x65", "try     --input takes another shape")
    assert "Traceback" not in wide.stderr and "--fixed-batch" not in wide.stderr
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
    assert 'transformers.BertModel.from_pretrained("FOLDER")' in card
    assert Path("pruned/report.json").is_file() and not Path("hub/report.json").exists()
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
    refused(zoo("export", "dense", "--to", "huggingface", "--out", "x"), "nothing in dense is sparse", "twofour prune")
    refused(zoo("export", "pruned", "--to", "huggingface", "--out", "x", "--pattern", "1:4"), "leave --pattern out")
    assert not [path for path in Path().iterdir() if path.name.startswith(".hub")]


def test_what_cannot_be_exported_is_refused(zoo) -> None:
    assert zoo("export", "zoo_more:pruned", "--to", "gguf", "--out", "x").exit_code == 2
    twofour.save(importlib.import_module("zoo_more").zoo_cli.small(), "dense.safetensors")
    words = ("--to", "onnx", "--out", "x.onnx", "--input", "64")
    refused(
        zoo("export", "dense.safetensors", "--model", "zoo_cli:small", *words), "does not say which", "--pattern 2:4"
    )
    refused(zoo("export", "zoo_more:pruned", "--to", "huggingface", "--out", "x"), "only models of transformers")
    refused(zoo("export", "dense.safetensors", *words), "layers they belong to", "--model package.module:function")
    Path("lie.json").write_text('{"sparse": "x"}')
    refused(zoo("export", "dense.safetensors", "--to", "huggingface", "--out", "x", "--accuracy", "lie.json"), "layers")


def test_a_bare_file_becomes_what_pattern_says_if_it_is_that(zoo) -> None:
    model = importlib.import_module("zoo_more").pruned()
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    save_file(state, "bare.safetensors")
    words = ("export", "bare.safetensors", "--to", "safetensors", "--out", "plain.safetensors")
    refused(zoo(*words), "nothing in bare.safetensors is sparse", "--pattern 2:4")
    refused(zoo(*words, "--pattern", "1:4"), "not as sparse as promised", "`0.weight`: 1:4 broken", "2 of 2")
    assert not Path("plain.safetensors").exists()
    result = zoo(*words, "--pattern", "2:4")
    assert result.exit_code == 0 and "2 sparse weights" in result.stdout, result.output  # ASP's rule leaves 4.weight
    with safe_open("plain.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["twofour.patterns"]) == {"0.weight": "2:4", "2.weight": "2:4"}
    assert zoo("check", "plain.safetensors").exit_code == 0


def test_a_file_that_breaks_its_promise_is_not_passed_on(zoo) -> None:
    zoo_more = importlib.import_module("zoo_more")
    state = zoo_more.zoo_cli.small().state_dict()
    promise = json.dumps({"0.weight": "2:4", "2.weight": "2:4"})
    save_file(state, "lie.safetensors", metadata={"twofour.patterns": promise})
    words = ("export", "lie.safetensors", "--to", "safetensors", "--out", "x.safetensors")
    refused(zoo(*words), "not as sparse as promised", "2 of 2")
    twofour.save(zoo_more.pruned(), "packed.safetensors")
    refused(zoo("export", "packed.safetensors", *words[2:], "--pattern", "1:4"), "says itself", "`0.weight`: 2:4")
    refused(zoo("export", "zoo_more:forgotten", *words[2:]), "layer `0.weight`: the weight is not 2:4")
    assert not Path("x.safetensors").exists()


def test_tied_tensors_of_a_packed_file_stand_under_each_name(zoo) -> None:
    model = twofour.prune(importlib.import_module("zoo_more").zoo_cli.tied(), "2:4")
    twofour.save(model, "tied.safetensors")
    assert zoo("export", "tied.safetensors", "--to", "safetensors", "--out", "plain.safetensors").exit_code == 0
    plain = load_file("plain.safetensors")
    assert plain.keys() == model.state_dict().keys() and torch.equal(plain["0.weight"], plain["1.weight"])


@pytest.mark.parametrize("to", ["safetensors", "onnx"])
def test_a_dense_model_is_not_exported_as_a_sparse_one(zoo, to: str) -> None:
    words = ("--to", to, "--out", "x", *(("--input", "64") if to == "onnx" else ()))
    refused(zoo("export", "zoo_cli:small", *words), "nothing in zoo_cli:small is sparse", "twofour prune")
    refused(zoo("export", "zoo_cli:small", *words, "--pattern", "2:4"), "no masks can be derived", "`twofour prune`")
    refused(zoo("export", "zoo_more:pruned", *words, "--pattern", "1:4"), "says itself", "leave --pattern out")
    refused(zoo("export", "zoo_more:pruned", *words, "--model", "zoo_cli:small"), "leave --model out")
    assert not Path("x").exists()


@pytest.mark.parametrize(("to", "out"), [("runtime", "m.two4"), ("onnx", "m.onnx"), ("safetensors", "m.safetensors")])
def test_low_bits_are_a_reason_to_export(zoo, to: str, out: str) -> None:
    options = () if to == "safetensors" else ("--input", "64")
    result = zoo("export", "zoo_more:low_bits", "--to", to, "--out", out, *options, "--json", "r.json")
    if to == "safetensors":
        return refused(result, "no words for its low bits", "--to onnx or --to runtime")
    assert result.exit_code == 0, result.output
    assert "0 sparse weights, 2 layers of low bits" in result.output and Path(out).exists()
    assert json.loads(Path("r.json").read_text())["low_bits"] == {"0": "w4a8", "2": "w4a8"}


def test_a_file_of_low_bits_fills_its_model(zoo) -> None:
    model = importlib.import_module("zoo_more").low_bits()
    twofour.save(model, "bits.safetensors")
    again = sparse.model(sources.resolve("bits.safetensors"), "zoo_more:small_floats", None, low_bits=True)
    assert quantization.of(again) == quantization.of(model)


def test_the_same_pattern_as_the_masks_is_accepted(zoo) -> None:
    result = zoo("export", "zoo_more:quarter", "--to", "safetensors", "--out", "x.safetensors", "--pattern", "1:4")
    assert result.exit_code == 0, result.stderr


def test_what_a_file_says_of_its_weights_goes_before_their_packed_form(zoo) -> None:
    twofour.save(importlib.import_module("zoo_more").both_ways(), "both.safetensors")
    words = ("export", "both.safetensors", "--to", "safetensors", "--out", "x.safetensors", "--pattern")
    refused(zoo(*words, "2:4"), "says itself", "2:4-transposable")
    assert zoo(*words, "2:4-transposable").exit_code == 0


def test_options_that_mean_nothing_are_refused(zoo) -> None:
    words = ("export", "zoo_more:pruned", "--out", "x.safetensors", "--to", "safetensors")
    for option in (("--dtype", "int8"), ("--input", "5x5"), ("--fixed-batch",), ("--recipe", "r.toml"), ("--smooth",)):
        refused(zoo(*words, *option), f"{option[0]} means nothing for --to safetensors")
    onnx = ("export", "zoo_more:pruned", "--out", "x.onnx", "--to", "onnx", "--input", "64")
    refused(zoo(*onnx, "--data", "zoo_more:inputs"), "leave --input out")


def test_missing_packages_are_named_before_a_model_is_read(zoo, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    words = ("--to", "onnx", "--input", "64", "--out", "x.onnx")
    result = zoo("export", "zoo_more:not_there", *words)
    refused(result, "packages that are not installed", "twofour[onnx]")
    assert "not_there" not in result.output and "reading" not in result.output
