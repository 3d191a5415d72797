"""twofour prune on folders and files: sharded, resumed, refused where it does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import twofour
from tests.checkpoints.small import random
from tests.cli.small import refused
from twofour import streaming
from twofour.checkpoints import Checkpoint
from twofour.cli import huggingface, streamed

SIZES = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    folder = random(tmp_path / "hub", "GPT2Config", "GPT2LMHeadModel", "60KB", **SIZES)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_sharded_folder(run, hub: Path):
    result = run("prune", "hub", "--out", "out", "--json", "r.json")
    assert result.exit_code == 0, result.output
    assert "OK: 8 of 8 promised weights kept; 2 skipped" in result.stdout and "hf_conv1d" in result.stdout
    names = {path.name for path in Path("out").iterdir()}
    assert names == {path.name for path in hub.iterdir()} | {"recipe.toml", "report.json"}
    report = json.loads(Path("r.json").read_text())
    assert report == json.loads(Path("out/report.json").read_text()) and len(report["layers"]) == 8
    assert {file for file in names if file.endswith(".safetensors")} == {row["file"] for row in report["layers"]}
    model = huggingface.load(Path("out"))
    assert twofour.check(model).ok and model.config.twofour["patterns"] == {"2:4": 8}
    assert len(Checkpoint.open("out").files) > 2
    assert run("prune", "hub", "--out", "out").exit_code == 2
    assert run("prune", "hub", "--out", "out", "--force", "--criterion", "random").exit_code == 0
    assert sorted(path.name for path in Path.cwd().iterdir() if path.name.startswith(("out", "."))) == ["out"]


def test_a_run_killed_before_it_removed_its_journal(run, hub: Path, monkeypatch: pytest.MonkeyPatch):
    unlink = Path.unlink

    def dies(self: Path, missing_ok: bool = False) -> None:
        if self.name == "out.journal.json":
            raise KeyboardInterrupt
        unlink(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", dies)
        assert run("prune", "hub", "--out", "out").exit_code != 0
    assert Path("out/report.json").exists() and Path("out.journal.json").exists()
    assert run("prune", "hub", "--out", "out").exit_code == 2 and not Path("out.journal.json").exists()


def test_the_journal_of_an_interrupted_replacement_stays_while_its_files_are_elsewhere(run, hub: Path, monkeypatch):
    run("prune", "hub", "--out", "out")
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run("prune", "hub", "--out", "out", "--force", "--pattern", "1:4").exit_code != 0
    journal = Path("out.journal.json").read_bytes()
    Path("out.unfinished").rename("elsewhere")
    assert run("prune", "hub", "--out", "out").exit_code == 2
    assert Path("out.journal.json").read_bytes() == journal
    Path("elsewhere").rename("out.unfinished")
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before
    assert run("prune", "hub", "--out", "out", "--force", "--pattern", "1:4").exit_code == 0
    assert sorted(path.name for path in Path.cwd().iterdir() if path.name.startswith(("out", "."))) == ["out"]


def test_an_interrupted_run_goes_on(run, hub: Path, monkeypatch: pytest.MonkeyPatch):
    real, last = streaming.prune, list(Checkpoint.open(hub).entries)[-1]

    def interrupted(*args, progress, **options):
        def stop(done: int, total: int, what: str) -> None:
            progress(done, total, what)
            if what == last:
                raise KeyboardInterrupt

        return real(*args, progress=stop, **options)

    monkeypatch.setattr(streaming, "prune", interrupted)
    result = run("prune", "hub", "--out", "out")
    assert result.exit_code != 0 and "finished files are kept in" in result.stderr
    assert not Path("out").exists() and Path("out.unfinished").is_dir() and Path("out.journal.json").is_file()
    monkeypatch.setattr(streaming, "prune", real)
    refused(run("prune", "hub", "--out", "out", "--pattern", "1:4"), "another recipe", "out.unfinished")
    result = run("prune", "hub", "--out", "out")
    assert result.exit_code == 0 and "went on where an earlier run stopped" in result.stdout, result.output
    assert not Path("out.unfinished").exists() and not Path("out.journal.json").exists()
    assert run("prune", "hub", "--out", "whole").exit_code == 0
    for path in Path("whole").glob("*.safetensors"):
        assert path.read_bytes() == (Path("out") / path.name).read_bytes()


def test_an_axis_of_zero_in_a_bare_file(run):
    weight = torch.randn(32, 48)
    save_file({"c_fc.weight": weight, "fc.weight": weight.clone()}, "w.safetensors")
    words = ("--include", "*", "--axis", "c_*=0", "--axis", "1", "--out", "out")
    assert run("prune", "w.safetensors", *words).exit_code == 0
    found = load_file("out/model.safetensors")
    assert (found["c_fc.weight"].view(8, 4, 48) != 0).sum(1).max() == 2
    assert (found["fc.weight"].view(32, 12, 4) != 0).sum(2).max() == 2
    assert run("check", "out").exit_code == 0
    refused(run("prune", "zoo_cli:small", "--out", "no", "--axis", "1"), "--axis is for a bare file")


def test_what_does_not_fit_is_said_before_loading(run, hub: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streamed, "free_memory_bytes", lambda: 100_000)
    x = torch.zeros(4, 8, dtype=torch.int64)
    save_file({"input_ids": x}, "x.safetensors")
    result = run("prune", "hub", "--out", "out", "--criterion", "wanda", "--data", "x.safetensors")
    refused(result, "does not fit into memory", "0.0 GB are free", '"magnitude" and "random"')
    assert run("prune", "hub", "--out", "out").exit_code == 0  # part by part it does


def test_ray_is_for_files(run, hub: Path, monkeypatch: pytest.MonkeyPatch):
    refused(run("prune", "zoo_cli:small", "--out", "out", "--ray", "local"), "only files are spread over machines")
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    refused(run("prune", "hub", "--out", "out", "--ray", "auto"), "needs Ray", 'pip install "twofour[ray]"')
    assert not Path("out").exists() and not list(Path.cwd().glob("out*"))


def test_nothing_to_prune_says_why_and_what_would_help(run, hub: Path):
    odd = run("prune", "hub", "--out", "out", "--pattern", "2:5")
    refused(odd, "is not a multiple of 5 (2:5)", "weights, each with a reason", "change what the reasons name")
    skipped = run("prune", "hub", "--out", "out", "--skip", "*")
    refused(skipped, "left out by skip='*'", " more: ")
    assert "eligibility" not in odd.stderr + skipped.stderr
    save_file({"a.weight": torch.randn(8, 12)}, "small.safetensors")
    words = ("--include", "*", "--axis", "1", "--out", "out")
    refused(run("prune", "small.safetensors", *words), "(ASP's rule)", "--eligibility any lifts ASP's rule")


def test_a_config_without_a_model_type_is_named(run):
    Path("hub").mkdir()
    Path("hub/config.json").write_text("{}")
    save_file({"a.weight": torch.randn(8, 16)}, "hub/model.safetensors")
    refused(run("check", "hub"), "a config.json that is no JSON object with model_type")


def test_a_journal_that_cannot_be_used_is_not_said_to_go_on(run, hub: Path):
    Path("out.journal.json").write_text("{}")
    result = run("prune", "hub", "--out", "out")
    refused(result, "cannot be gone on with")
    assert "goes on from there" not in result.stderr


@pytest.mark.parametrize("criterion", [(), ("--criterion", "random")])
def test_a_pruned_folder_is_left_as_it_is(run, hub: Path, criterion: tuple[str, ...]):
    """Streamed: the values, the criterion they were pruned by, and what is said."""
    assert run("prune", "hub", "--out", "out").exit_code == 0
    config = json.loads(Path("out/config.json").read_text())
    config["twofour"]["criterion"] = "admm"
    Path("out/config.json").write_text(json.dumps(config))
    result = run("prune", "out", "--out", "again", *criterion)
    assert result.exit_code == 0, result.output
    said = "and 7 more: pruned already, its zeros stay and the criterion has nothing to choose; values are left"
    assert said in " ".join(result.stdout.split()) and "no data" not in result.stdout
    assert json.loads(Path("again/config.json").read_text())["twofour"]["criterion"] == "admm"
    assert len(json.loads(Path("again/report.json").read_text())["settled"]) == 8
    for file in Path("out").glob("*.safetensors"):
        for name, values in load_file(file).items():
            assert torch.equal(load_file(Path("again") / file.name)[name], values), name
