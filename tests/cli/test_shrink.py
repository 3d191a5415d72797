"""twofour shrink: what it writes, and that both loaders read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import twofour
from tests.cli.small import refused
from tests.structure.shrink.networks import IDS, made
from twofour.structure.shrink import Cut


def test_a_function_is_shrunk_and_loads_into_its_large_model(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("shrink", "zoo_cli:small", "--out", "out", "--budget", "0.7", "--input", "64", "--json", "r.json")
    assert result.exit_code == 0, result.output
    assert "0.weight:0" in result.stdout and "parameters 17,226 -> " in result.stdout
    assert sorted(path.name for path in Path("out").iterdir()) == ["cut.json", "model.safetensors", "report.json"]
    report = json.loads(Path("r.json").read_text())
    assert report == json.loads(Path("out/report.json").read_text())
    assert report["parameters"][1] <= 0.7 * report["parameters"][0] and len(report["widths"]) == 2
    assert Cut.from_text(Path("out/cut.json").read_text()).axes
    monkeypatch.syspath_prepend(".")
    import zoo_cli

    loaded = twofour.load("out/model.safetensors", zoo_cli.small(), masked=True)
    assert sum(p.numel() for p in loaded.parameters()) == report["parameters"][1]
    refused(run("shrink", "zoo_cli:small", "--out", "out", "--input", "64"), "out exists already")
    refused(
        run("shrink", "zoo_cli:small", "--out", "two", "--input", "64", "--budget", "0.01"),
        "cannot be met",
        "--streams every residual stream",
    )
    wide = ("shrink", "zoo_cli:small", "--out", "two", "--input", "64", "--budget", "0.5")
    refused(run(*wide, "--least", "0.9"), "reason  --least 0.9 stands in the way: the budget can be met without it")
    refused(run(*wide, "--least", "0"), "`least` is impossible")
    refused(run(*wide, "--plot", "widths.foo"), "widths.foo cannot be drawn", "ends in '.foo'")
    refused(run("shrink", "zoo_cli:small", "--out", "two", "--budget", "1.5"), "the budget is impossible")
    said = ("the budget is impossible", "got     --budget 50%", "try     --budget 0.5")
    refused(run("shrink", "zoo_cli:small", "--out", "two", "--budget", "50%"), *said)
    options = ("--out", "two", "--input", "64", "--drop", "auto")
    refused(run("shrink", "zoo_cli:small", *options), "no layer can be chosen", "try     --data")
    refused(run("shrink", "zoo_cli:small", "--out", "two"), "the shape of its input is not known")
    refused(run("shrink", "zoo_cli:small", "--out", "two", "--count", "watts"), "counts nothing of that name", "macs")
    assert not Path("two").exists()


def test_data_solve_weights_anew_and_widths_are_drawn(run: Any) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    from safetensors.torch import save_file

    save_file({"x": torch.randn(512, 64)}, "rows.safetensors")
    options = ("--budget", "0.8", "--count", "macs", "--data", "rows.safetensors", "--plot", "widths.svg")
    options += ("--samples", "512")
    result = run("shrink", "zoo_cli:small", "--out", "out", *options)
    assert result.exit_code == 0, result.output
    save_file({"x": torch.full((64, 64), float("nan"))}, "lost.safetensors")
    refused(run("shrink", "zoo_cli:small", "--out", "two", "--data", "lost.safetensors"), "data hold NaN", "512 values")
    report = json.loads(Path("out/report.json").read_text())
    assert {width["source"] for width in report["widths"]} == {"second-order"} and report["reconstructed"]
    assert report["macs"][1] <= 0.8 * report["macs"][0] and "<svg" in Path("widths.svg").read_text()


def test_a_folder_of_hugging_face_loads_with_from_pretrained(run: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    model, _ = made("llama")
    model.save_pretrained("large")
    dropped = run("shrink", "large", "--out", "two", "--budget", "0.6", "--length", "8", "--drop", "model.layers.1")
    assert dropped.exit_code == 0, dropped.output
    layers, widths = (Cut.from_text(Path(f"two/cut-{number}.json").read_text()) for number in (1, 2))
    assert layers.layers == ("model.layers.1",) and widths.axes and not Path("two/cut.json").exists()
    result = run("shrink", "large", "--out", "small", "--budget", "0.8", "--length", "8")
    assert result.exit_code == 0, result.output
    assert "from_pretrained loads it" in result.stdout
    small = transformers.AutoModelForCausalLM.from_pretrained("small").eval()
    loaded = twofour.load("small/model.safetensors", model, masked=True)
    with torch.no_grad():
        assert torch.equal(small(input_ids=IDS).logits, loaded(input_ids=IDS).logits)
    assert small.config.intermediate_size < 48 or small.config.num_attention_heads < 8
