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
