"""Configurations of transformers that say the sizes of a shrunk model, where they can."""

from pathlib import Path
from typing import Any

import pytest
import torch

import twofour
from tests.structure.shrink.networks import made
from twofour import calls, shrinking
from twofour.structure import shrink

pytest.importorskip("transformers", reason="needs the extra [text]")


def logits(model: Any, example: Any) -> torch.Tensor:
    with torch.no_grad(), calls.without_cache(model):
        return calls.call(model, example).logits


@pytest.mark.parametrize(("name", "layers"), [("llama", ("model.layers.1",)), ("gpt2", ())])
def test_a_folder_loads_with_from_pretrained(name: str, layers: Any, tmp_path: Path) -> None:
    model, example = made(name)
    small: Any = twofour.shrink(model, example, 0.75, uniform=True, layers=layers)
    report = shrinking.report_of(small)
    assert report is not None and report.config == "", report.config
    small.save_pretrained(tmp_path / "small")
    again = type(model).from_pretrained(tmp_path / "small").eval()
    assert torch.equal(logits(again, example), logits(small, example))
    assert again.config.num_hidden_layers == 2 - len(layers)
    assert sum(p.numel() for p in again.parameters()) == report.parameters[1]
    twofour.save(small, tmp_path / "small.safetensors")
    loaded = twofour.load(tmp_path / "small.safetensors", made(name)[0], masked=True)
    assert torch.equal(logits(loaded, example), logits(small, example))


def test_what_a_configuration_cannot_say_stays_whole(tmp_path: Path) -> None:
    """BERT's heads are as wide as its stream divided by their number."""
    model, example = made("bert")
    small: Any = twofour.shrink(model, example, 0.9, uniform=True)
    report = shrinking.report_of(small)
    assert report is not None and report.config == "", report.config
    whole = [uncut for uncut in report.uncut if "uniform=True wants one that does" in uncut.reason]
    heads = [uncut for uncut in whole if "attention" in uncut.names[0]]
    assert len(heads) == 2 and all(uncut.size == model.config.num_attention_heads for uncut in heads)
    small.save_pretrained(tmp_path / "small")
    again = type(model).from_pretrained(tmp_path / "small").eval()
    with torch.no_grad(), calls.without_cache(small):
        found, want = calls.call(again, example), calls.call(small, example)
    assert torch.equal(found[0], want[0])


@pytest.mark.long
def test_one_number_stands_for_encoder_and_decoder(tmp_path: Path) -> None:
    model, example = made("t5")
    small: Any = twofour.shrink(model, example, 0.85, uniform=True)
    report = shrinking.report_of(small)
    assert report is not None and report.config == "", report.config
    small.save_pretrained(tmp_path / "small")
    again = type(model).from_pretrained(tmp_path / "small").eval()
    assert torch.equal(logits(again, example), logits(small, example))


@pytest.mark.parametrize("keys", [8, 4])
def test_heads_go_and_keep_their_width(keys: int, tmp_path: Path) -> None:
    """Heads of half the width would give the same shapes: the numbers of the modules tell them apart."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=keys,
        vocab_size=40, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = {"input_ids": torch.arange(16).view(2, 8)}
    found = shrink.channels(model, ids)
    heads = {g.name: range(keys // 2) for g in found.groups if g.name.endswith("q_proj.weight:0") and g.size == keys}
    small: Any = shrink.cut(model, found.plan(heads))
    assert len(heads) == 2 and shrink.configure(small) == ""
    said = small.config
    assert (said.num_attention_heads, said.num_key_value_heads, said.head_dim) == (4, keys // 2, 8)
    small.save_pretrained(tmp_path / "small")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "small").eval()
    torch.testing.assert_close(logits(again, ids), logits(small, ids))


def test_what_a_configuration_cannot_say_is_told_and_it_stays() -> None:
    model, example = made("bert")
    found = shrink.channels(model, example)
    small: Any = shrink.cut(model, found.plan({"bert.encoder.layer.0.intermediate.dense.weight:0": range(24)}))
    assert "cannot say the size of `bert.encoder.layer.0" in shrink.configure(small)
    assert small.config.intermediate_size == 48
    both = {f"bert.encoder.layer.{i}.intermediate.dense.weight:0": range(24) for i in range(2)}
    small = shrink.cut(model, found.plan(both))
    assert shrink.configure(small) == "" and small.config.intermediate_size == 24
    assert model.config.intermediate_size == 48
    heads = {f"bert.encoder.layer.{i}.attention.self.query.weight:0": range(3) for i in range(2)}
    assert "cannot say" in shrink.configure(shrink.cut(model, found.plan(heads)))
    assert shrink.configure(torch.nn.Linear(2, 2)) == "it is no model of transformers"


def gemma(layers: int = 4) -> Any:
    """Layers whose attention sees 4 tokens, and all, in turn: the forward looks up which by the place in the list."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, sliding_window=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=1,
        pad_token_id=0, layer_types=["sliding_attention", "full_attention"] * (layers // 2),
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


TOKENS = {"input_ids": torch.arange(2, 34).view(1, 32)}


def test_layers_keep_the_masks_that_the_configuration_lists_for_them(tmp_path: Path) -> None:
    model, gone = gemma(), "model.layers.0"
    plan = shrink.Cut(layers=(gone,))
    shrink.verify(model, plan, TOKENS)
    hook = model.model.layers[0].register_forward_hook(lambda _m, args, _out: args[0])  # as if it were not there
    wanted = logits(model, TOKENS)
    hook.remove()
    small: Any = shrink.cut(model, plan)
    assert torch.equal(logits(small, TOKENS), wanted)
    assert shrink.configure(small, TOKENS) == "" and torch.equal(logits(small, TOKENS), wanted)
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert small.config.layer_types == types and small.config.num_hidden_layers == 3
    assert len(model.config.layer_types) == model.config.num_hidden_layers == 4
    small.save_pretrained(tmp_path / "small")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "small").eval(), TOKENS), wanted)
    twofour.save(small, tmp_path / "small.safetensors")
    large = gemma()
    loaded: Any = twofour.load(tmp_path / "small.safetensors", large, masked=True)
    assert torch.equal(logits(loaded, TOKENS), wanted)
    assert loaded.config.layer_types == types and loaded.config.num_hidden_layers == 3
    again: Any = shrink.cut(small, plan)
    assert shrink.configure(again, TOKENS) == "" and again.config.layer_types == types[1:]


def test_a_model_whose_layers_went_is_shrunk_saved_and_loaded(tmp_path: Path) -> None:
    model = gemma()
    small: Any = twofour.shrink(model, TOKENS, 0.75, layers=["model.layers.0"], uniform=True)
    report = shrinking.report_of(small)
    assert report is not None and report.config == ""
    twofour.save(small, tmp_path / "small.safetensors")
    loaded = twofour.load(tmp_path / "small.safetensors", gemma(), masked=True)
    small.save_pretrained(tmp_path / "small")
    again = type(model).from_pretrained(tmp_path / "small").eval()
    assert torch.equal(logits(loaded, TOKENS), logits(small, TOKENS))
    assert torch.equal(logits(again, TOKENS), logits(small, TOKENS))


def test_a_configuration_is_put_back_with_the_layers(tmp_path: Path) -> None:
    small = shrink.cut(gemma(), shrink.Cut(layers=("model.layers.1",)))
    twofour.save(small, tmp_path / "small.safetensors")
    other = gemma()
    other.lm_head = torch.nn.Linear(32, 60)
    before = other.config.to_dict()
    with pytest.raises(twofour.errors.FormatError):
        twofour.load(tmp_path / "small.safetensors", other, masked=True)
    assert other.config.to_dict() == before and len(other.model.layers) == 4


def test_a_configuration_that_changes_what_is_computed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Capped:
        """Says another number than a size, which the forward looks up."""

        def __init__(self, *_: Any) -> None: ...

        def wrong(self, said: Any) -> list[str]:
            said.final_logit_softcapping = 0.5
            return []

    monkeypatch.setattr("twofour.structure.shrink.config._Wanted", Capped)
    small = shrink.cut(gemma(), shrink.Cut(layers=("model.layers.1",)))
    wanted = logits(small, TOKENS)
    assert "computes something else" in shrink.configure(small, TOKENS)
    assert torch.equal(logits(small, TOKENS), wanted)
