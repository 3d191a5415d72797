"""twofour prune: what it writes, what it replaces, what it refuses."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import twofour
import twofour.layers
from tests.cli.small import refused
from twofour.checkpoints import Checkpoint
from twofour.cli import prune
from twofour.streaming import result_folder


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
    refused(run(*words), "a report.json that `twofour` did not write")


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
    again = ("prune", "first/model.safetensors", "--include", "*", "--axis", "1", "--force", "--out")
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
    refused(
        run("prune", "zoo_cli:small", "--out", "bad", "--criterion", "wonda"), '"magnitude", ', '"auto"', 'mean "wanda"'
    )
    refused(
        run("prune", "zoo_cli:small", "--out", "bad", "--criterion", "wanda"), "RecipeError", "needs calibration data"
    )
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
    words = ("prune", "dense.safetensors", "--out", "out", "--include", "fc")
    refused(run(*words), "nor along which axis they sum", "--axis 1", "`fc.weight` (16, 32)")
    refused(run(*words, "--axis", "2"), "--axis 2 cannot be read")
    refused(run(*words, "--axis", "conv=1"), "along which axis the product with `fc.weight` sums", "(16, 32)")
    result = run(
        "prune", "dense.safetensors", "--out", "out", "--include", "fc", "--include", "conv.weight", "--axis", "1"
    )
    assert result.exit_code == 0 and "2 of 2 promised weights kept" in result.stdout, result.output
    written = load_file("out/model.safetensors")
    assert torch.equal(written["embed.weight"], weights["embed.weight"])
    assert (written["conv.weight"].movedim(1, -1).reshape(-1, 4) != 0).sum(1).max() == 2
    (said,) = Checkpoint.open("out/model.safetensors").metadata.values()
    assert said["author"] == "someone"
    assert run("check", "out/model.safetensors").exit_code == 0
    refused(
        run("prune", "dense.safetensors", "--out", "no", "--include", "none", "--axis", "1"),
        "no weight in dense.safetensors",
    )


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
    words = ("prune", "w.safetensors", "--include", "*", "--axis", "1", "--json", "r.json", "--out")
    assert run(*words, "asp").exit_code == 0
    report = json.loads(Path("r.json").read_text())
    assert sorted(layer["name"] for layer in report["layers"]) == ["conv1d.weight", "fits.weight", "video.weight"]
    reasons = {entry["name"]: entry["reason"] for entry in report["skipped"]}
    asked = twofour.layers.walk(nn.Linear(12, 16)).skipped[0].reason  # what a model's layer is told
    assert reasons["odd.weight"] == asked and "ASP" in asked
    assert "out_features 10" in reasons["head.weight"] and "in_channels 3" in reasons["stem.weight"]
    assert "int64" in reasons["whole.weight"] and "(0, 32)" in reasons["none.weight"]
    assert run(*words, "any", "--eligibility", "any").exit_code == 0
    report = json.loads(Path("r.json").read_text())
    assert [entry["name"] for entry in report["layers"]] == [
        "conv1d.weight", "fits.weight", "head.weight", "odd.weight", "video.weight",
    ]  # fmt: skip
    reasons = {entry["name"]: entry["reason"] for entry in report["skipped"]}
    assert reasons["stem.weight"] == "its reduction axis 3 is not a multiple of 4"


def test_a_file_with_bad_values_names_the_weight(run):
    save_file({"fc.weight": torch.full((16, 32), float("nan"))}, "nan.safetensors")
    refused(
        run("prune", "nan.safetensors", "--out", "out", "--include", "*", "--axis", "1"),
        "PatternError",
        "fc.weight",
        "NaN",
    )
    assert not Path("out").exists()


def test_what_the_user_put_into_an_unfinished_result_is_never_taken_for_ours(run, tmp_path: Path):
    run("prune", "zoo_cli:small", "--out", "out")
    Path("out/thesis.txt").write_text("mine")
    assert run("prune", "zoo_cli:small", "--out", "out", "--force").exit_code != 0
    assert Path("out/thesis.txt").read_text() == "mine"


def test_what_appears_in_the_result_while_a_new_one_is_made_stays(run, monkeypatch):
    run("prune", "zoo_cli:small", "--out", "out")
    write = prune.write_pruned

    def slow(*arguments):
        Path("out/thesis.txt").write_text("mine")
        return write(*arguments)

    monkeypatch.setattr(prune, "write_pruned", slow)
    result = run("prune", "zoo_cli:small", "--out", "out", "--force", "--pattern", "1:4")
    assert result.exit_code != 0 and "thesis.txt" in result.output
    assert Path("out/thesis.txt").read_text() == "mine" and Path("out/model.safetensors").exists()


def test_a_result_that_another_run_is_still_bringing_to_its_place_is_not_replaced(run):
    run("prune", "zoo_cli:small", "--out", "out")
    handle = os.open("out", os.O_RDONLY)  # the folder that a run has just renamed stays locked until it ends
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        refused(run("prune", "zoo_cli:small", "--out", "out", "--force"), "another process is writing the same result")
    finally:
        os.close(handle)
    assert Path("out/report.json").exists() and not Path("out.unfinished").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_backup_beside_the_result_stays_whatever_it_is_called_and_whatever_the_run_comes_to(run):
    run("prune", "zoo_cli:small", "--out", "out")
    backup = Path("out.replaced")
    shutil.copytree("out", backup)
    kept = contents(backup)
    refused(run("prune", "zoo_cli:small", "--out", "out"), "out exists already")
    assert contents(backup) == kept
    assert run("prune", "zoo_cli:small", "--out", "out", "--force").exit_code == 0 and contents(backup) == kept
    save_file({"fc.weight": torch.full((16, 32), float("nan"))}, "nan.safetensors")
    fails = ("prune", "nan.safetensors", "--out", "out", "--include", "*", "--axis", "1")
    for place in (True, False):  # an empty one, and none
        shutil.rmtree("out")
        if place:
            Path("out").mkdir()
        refused(run(*fails), "NaN")
        assert contents(backup) == kept and Path("out").exists() == place
        Path("out").mkdir(exist_ok=True)


@pytest.fixture
def killed(run, monkeypatch: pytest.MonkeyPatch):
    """Replace `out` in a run that is killed before the new result is in its place, or behind that; return the old."""

    def kill(before: bool) -> dict[str, bytes]:
        assert run("prune", "zoo_cli:small", "--out", "out").exit_code == 0
        old, rename = contents(Path("out")), Path.rename
        with monkeypatch.context() as patch:

            def dies(self: Path, target: Path) -> Path:
                if self.name == "new" and before:
                    raise KeyboardInterrupt
                return rename(self, target)

            patch.setattr(Path, "rename", dies)
            patch.setattr(result_folder, "_settle", lambda *_: None)
            ended = run("prune", "zoo_cli:small", "--out", "out", "--force", "--pattern", "1:4")
        assert (ended.exit_code == 0) == (not before) and Path("out").exists() == (not before)
        assert contents(left() / "earlier") == old
        return old

    return kill


def left() -> Path:
    (folder,) = Path().glob(".out.twofour-*.old")
    return folder


def test_a_replacement_killed_before_its_end_is_cleared_up_by_the_next_run(run, killed):
    old = killed(before=True)
    refused(run("prune", "zoo_cli:small", "--out", "out", "--pattern", "two"), "PatternError")
    assert not Path("out").exists() and left(), "a run that is refused at once moves nothing"
    refused(run("prune", "zoo_cli:small", "--out", "out"), "out exists already")
    assert contents(Path("out")) == old and not list(Path().glob(".out*"))
    shutil.rmtree("out")
    killed(before=False)
    assert run("prune", "zoo_cli:small", "--out", "out", "--force").exit_code == 0
    assert not list(Path().glob("out.*")) and not list(Path().glob(".out*"))


@pytest.mark.parametrize("lost", ["all", "one file", "the report"])
def test_an_earlier_result_stays_where_the_new_one_is_not_whole(run, killed, lost):
    old = killed(before=False)
    if lost == "all":
        shutil.rmtree("out")
        shutil.copytree(left() / "earlier", "out")  # the user's own: a result, but not that of the run
    else:
        Path("out", "model.safetensors" if lost == "one file" else "report.json").unlink()
    ended = run("prune", "zoo_cli:small", "--out", "out", "--force")
    assert (ended.exit_code == 0) == (lost != "the report")
    assert contents(left() / "earlier") == old
    assert lost == "the report" or "out is not what was to replace it" in ended.stderr


def test_a_folder_that_no_run_marked_is_neither_moved_nor_removed(run):
    run("prune", "zoo_cli:small", "--out", "out")
    place = Path(".out.twofour-a1b2c3d4.old")
    place.mkdir()
    Path("out").rename(place / "earlier")
    for note in (None, "{}", '{"out": "other", "report": ""}'):
        if note is not None:
            (place / "moved.json").write_text(note)
        assert run("prune", "zoo_cli:small", "--out", "out", "--force").exit_code == 0
        assert (place / "earlier" / "report.json").is_file()
