"""A model with blocks leaves by every door: plain files, ONNX, a folder of Hugging Face, each read back and checked."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import twofour
from tests.export.small import Net
from twofour import export, masks
from twofour.patterns import Block, parse

RULES = {"conv": "block:8x8@0.5", "fc": "block:16x16@0.75", "head": "block:4x8@0.5"}


def pruned() -> Net:
    """Blocks of three sizes, of a convolution and with a rim (head has 10 rows)."""
    torch.manual_seed(0)
    model = Net().eval()
    twofour.prune(model, RULES, eligibility="any")
    return model


def test_plain_safetensors_hold_the_zeros_and_say_the_patterns(tmp_path: Path) -> None:
    model, file = pruned(), tmp_path / "plain.safetensors"
    assert sorted(export.to_safetensors(model, file)) == ["conv.weight", "fc.weight", "head.weight"]
    stored = load_file(file)
    for name, mask in masks.of(model).items():
        assert torch.equal(stored[name], mask.parameter) and not stored[name][~mask.keep].any()
    report = twofour.check(file)
    assert report.ok and {layer.name: layer.promised for layer in report.layers if layer.promised} == {
        f"{name}.weight": text for name, text in RULES.items()
    }
    again = Net().eval()
    twofour.load(file, again, masked=True)
    x = torch.randn(2, 16, 4, 4)
    assert torch.equal(again(x), model(x))
    assert {name: mask.pattern for name, mask in masks.of(again).items()} == {
        f"{name}.weight": parse(text) for name, text in RULES.items()
    }


def test_onnx_holds_plain_zeros(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra [onnx] is not installed")
    pytest.importorskip("onnxruntime", reason="the extra [onnx] is not installed")
    pytest.importorskip("onnxscript", reason="the extra [onnx] is not installed")
    model, file = pruned(), tmp_path / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = export.to_onnx(model, file, torch.randn(1, 16, 4, 4))
    assert done.error < 1e-4
    promised = {entry.key: entry.value for entry in onnx.load(file).metadata_props}["twofour.patterns"]
    assert set(json.loads(promised).values()) == set(RULES.values())
    values = {entry.name: onnx.numpy_helper.to_array(entry) for entry in onnx.load(file).graph.initializer}
    weight = torch.from_numpy(values["fc.weight"].copy())
    rule = Block(16, 16, 0.75)
    assert rule.check(weight if weight.shape == (64, 256) else weight.T).ok
    report = twofour.check(file)
    assert report.ok and sum(layer.promised is not None for layer in report.layers) == 3


def test_a_folder_of_hugging_face_says_the_blocks(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=40
    )
    model = twofour.prune(transformers.BertModel(config).eval(), "block:8x8@0.5", skip=["*pooler*"])
    export.to_huggingface(model, tmp_path / "folder")
    assert len({(tmp_path / "folder" / name).stat().st_mode for name in ("README.md", "model.safetensors")}) == 1
    assert "block:8x8@0.5" in (tmp_path / "folder" / "config.json").read_text()
    assert "block:8x8@0.5" in (tmp_path / "folder" / "README.md").read_text()
    again = transformers.BertModel.from_pretrained(tmp_path / "folder").eval()
    ids = torch.arange(6)[None]
    assert torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)
    report = twofour.check(tmp_path / "folder")
    assert report.ok and sum(layer.promised == "block:8x8@0.5" for layer in report.layers) == len(masks.of(model))


def test_the_runtimes_of_a_block_model_are_those_of_2_4_that_it_does_not_keep() -> None:
    (layer,) = [layer for layer in twofour.check(pruned()).layers if layer.name == "fc.weight"]
    assert layer.fits and not any(fit.ready for fit in layer.fits if "2:4" in fit.reason)
