"""Which layers the tensors of a folder are: names, axes, ties and kinds, without loading a weight."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints.small import random, shards
from twofour import layers
from twofour.checkpoints import Checkpoint, Structure, structure
from twofour.cli import huggingface
from twofour.errors import FormatError, LayerError, SourceError

GPT2 = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
BERT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
}


def opened(folder: Path) -> tuple[Checkpoint, Structure]:
    checkpoint = Checkpoint.open(folder)
    return checkpoint, structure(checkpoint)


def test_the_walk_is_that_of_the_loaded_model(tmp_path: Path):
    checkpoint, found = opened(random(tmp_path, "GPT2Config", "GPT2LMHeadModel", **GPT2))
    assert len(checkpoint.files) > 1 and all(value.is_meta for value in found.model.parameters())
    got, want = found.walk(), layers.walk(huggingface.load(tmp_path))
    assert [(w.name, w.kind, w.axis, w.aliases) for w in got.weights] == [
        (w.name, w.kind, w.axis, w.aliases) for w in want.weights
    ]
    assert got.skipped == want.skipped
    assert {weight.kind for weight in got.weights} == {"hf_conv1d"} and got.weights[0].axis.axis == 0
    for weight in got.weights:
        assert found.stored(weight) == (weight.name,)
        assert checkpoint.entries[weight.name].shape == tuple(weight.parameter.shape)


def test_a_tied_head_is_stored_once_and_has_both_names(tmp_path: Path):
    checkpoint, found = opened(random(tmp_path, "GPT2Config", "GPT2LMHeadModel", **GPT2))
    assert "lm_head.weight" not in checkpoint.entries
    (head,) = [weight for weight in found.walk(tied="*").weights if weight.layer == "lm_head"]
    assert found.stored(head) == ("transformer.wte.weight",)
    reasons = {skipped.name: skipped.reason for skipped in found.walk().skipped}
    assert "an embedding" in reasons["lm_head.weight"]


def test_a_base_model_in_the_class_of_a_task_and_the_other_way_round(tmp_path: Path):
    random(tmp_path, "BertConfig", "BertModel", **BERT)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    _, found = opened(tmp_path)
    name = "encoder.layer.0.attention.self.query.weight"
    assert found.parameters[name] == f"bert.{name}"
    (dense,) = [w for w in found.walk().weights if w.name == "cls.predictions.transform.dense.weight"]
    assert found.stored(dense) == ()  # the task's head is not in the files
    random(tmp_path / "task", "BertConfig", "BertForMaskedLM", **BERT)
    (tmp_path / "task/config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    _, found = opened(tmp_path / "task")
    assert found.parameters[f"bert.{name}"] == name
    assert found.unknown["cls.predictions.bias"] == "the model that config.json describes has no such parameter"


def test_experts_that_transformers_stacks_on_loading_belong_to_no_parameter(tmp_path: Path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    checkpoint, found = opened(random(tmp_path, "MixtralConfig", "MixtralForCausalLM", **sizes))
    experts = [name for name in checkpoint.entries if ".experts." in name]
    assert len(experts) == 6 and all("computes `" in found.unknown[name] for name in experts)
    assert any("q_proj" in name for name in found.parameters)


def test_a_bare_file_has_no_kinds(tmp_path: Path):
    save_file({"fc.weight": torch.zeros(4, 4)}, tmp_path / "w.safetensors")
    with pytest.raises(LayerError, match="does not say which kinds of layers") as error:
        structure(Checkpoint.open(tmp_path / "w.safetensors"))
    assert "Conv1D" in str(error.value)


def test_configs_of_other_models(tmp_path: Path):
    random(tmp_path, "BertConfig", "BertModel", **BERT)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(FormatError, match=r"disagree\n.*is \(.*\n.*by config.json"):
        opened(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "nothing-known"}))
    with pytest.raises(SourceError, match="transformers cannot make the model"):
        opened(tmp_path)
    shards(tmp_path / "other", {"x": torch.zeros(2)})
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="belong to different models"):
        opened(tmp_path / "other")


def test_bytes_have_the_shape_of_their_weight_unless_another_is_said(tmp_path: Path):
    random(tmp_path / "model", "BertConfig", "BertModel", **BERT)
    name = "encoder.layer.0.attention.self.query.weight"
    shards(tmp_path, {name: torch.zeros(8, 32).byte()})
    (tmp_path / "config.json").write_text((tmp_path / "model/config.json").read_text())
    with pytest.raises(FormatError, match=r"disagree\n.*is \(8, 32\)"):
        opened(tmp_path)
    assert structure(Checkpoint.open(tmp_path), {name: (32, 32)}).parameters[name] == name


def test_code_in_a_folder_is_never_run(tmp_path: Path):
    shards(tmp_path, {"x": torch.zeros(2)})
    config = {"model_type": "custom", "auto_map": {"AutoConfig": "custom.Config", "AutoModel": "custom.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "custom.py").write_text("raise SystemExit('the code of the folder was run')")
    with pytest.raises(SourceError, match="never run from a folder"):
        opened(tmp_path)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shards(tmp_path, {"x": torch.zeros(2)})
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SourceError, match="needs transformers"):
        opened(tmp_path)
