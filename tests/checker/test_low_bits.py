"""Layers of low bits under check: how wide they are, and whether their zeros are zeros of the whole numbers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import twofour
from twofour.errors import FormatError


def made(weights: str, inputs: str | None = "a8", *, sparse: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5))
    if sparse:
        twofour.prune(model, {"0": "2:4", "*": "dense"})
    return twofour.quantize(model, weights, inputs, ends=None)


def found(report: twofour.checker.Report) -> dict[str, tuple[str | None, str]]:
    return {finding.name: (finding.width, finding.verdict) for finding in report.layers}


def test_widths_and_zeros_of_a_model_and_of_its_file(tmp_path: Path) -> None:
    model, path = made("w2"), tmp_path / "m.safetensors"
    report = twofour.check(model)
    assert report.ok and found(report)["0.weight"] == ("w2a8", "w2a8: 2:4 kept")
    zeros = {finding.name: finding.zeros for finding in report.layers}
    assert 0.5 <= zeros["0.weight"] < 0.8 and "2.weight" in zeros
    assert "1 of 1 promised weights kept, 2 of low bits" in report.summary
    twofour.save(model, path)
    stored = twofour.check(path)
    assert stored.ok and found(stored)["0.weight"] == ("w2a8", "w2a8: 2:4 kept")
    assert {finding.name: finding.zeros for finding in stored.layers} == zeros
    assert stored.to_dict()["layers"][0]["width"] == "w2a8"
    assert '"2:4"' not in str(report) and "w2a8: 2:4 kept" in str(report)


def test_what_breaks_is_not_ok() -> None:
    model = made("w2")
    twofour.masks.of(model)["0.weight"].parameter.data.fill_(1.0)
    assert not twofour.check(model).ok
    model = made("w2", sparse=False)
    assert twofour.check(model).ok and not twofour.check(nn.Linear(32, 16)).ok
    model[0].weight_step.data[2] = float("nan")
    report = twofour.check(model)
    assert not report.ok and "NaN" in found(report)["0.weight"][1]
    assert "`weight_step`: nan; wanted finite steps" in str(report)
    model = made("w2", sparse=False)
    model[0].weight.data[3, 1] = float("nan")
    report = twofour.check(model)
    assert found(report)["0.weight"][1] == "w2a8: 1 values are NaN or infinite" and not report.layers[0].notes


def test_a_file_whose_widths_are_others_than_its_codes_is_refused_as_load_does(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    twofour.save(made("w2", sparse=False), path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for wrong, said in (
        ({"weights": "s3"}, "said to be of s3 and packed as s2"),
        ({"group": 8}, "said to have groups of 8"),
        ({"weights": "b2"}, "said to be of b2"),
    ):
        held = json.loads(metadata["twofour"])
        held["settings"]["low_bits"]["0"].update(wrong)
        save_file(tensors, path, {"twofour": json.dumps(held)})
        for ask in (twofour.check, lambda path: twofour.load(path, made("w2", sparse=False))):
            with pytest.raises(FormatError):
                ask(path)
        with pytest.raises(FormatError, match=said):
            twofour.check(path)


def test_signs_have_no_zeros_and_are_looked_at() -> None:
    report = twofour.check(made("w1", None, sparse=False))
    assert found(report) == {"0.weight": ("w1", "w1: dense"), "2.weight": ("w1", "w1: dense")}
    assert not report.skipped
