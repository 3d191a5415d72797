"""1 is a verdict: whatever else ends a command, exits with 2 and says why."""

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from twofour import checker
from twofour.cli.app import app
from twofour.errors import explained

LEAVES_IN_FORWARD = """from torch import nn
class Leaves(nn.Linear):
    def forward(self, x):
        raise SystemExit(0)
def build():
    return Leaves(16, 16)
"""

BUILDS = """import twofour
from torch import nn
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
    def forward(self, input_ids):
        return self.fc(input_ids)
def build():
    return nn.Linear(16, 16)
def sparse():
    return twofour.prune(build(), "2:4")
def words():
    return twofour.prune(Words(), "2:4")
"""


def run(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file({"fc.weight": torch.ones(16, 32)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_a_broken_promise_is_1_and_a_kept_one_0(weights: Path) -> None:
    assert run("check", weights, "--expect", "2:4").exit_code == 1
    save_file({"fc.weight": torch.tensor([1.0, 1, 0, 0]).repeat(16, 8)}, weights)
    assert run("check", weights, "--expect", "2:4").exit_code == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(5, "Input/output error"), "Input/output error"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("odd"), "fault of twofour"),
        (RecursionError("deep"), "fault of twofour"),
    ],
)
def test_errors_that_nobody_foresaw_are_2(weights: Path, monkeypatch, error: Exception, said: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(checker, "check", fail)
    found = run("check", weights)
    assert found.exit_code == 2 and said in found.stderr
    assert ("Traceback" in found.stderr) == (said == "fault of twofour")


def test_a_wrong_option_is_2(weights: Path) -> None:
    assert run("check", weights, "--nothing").exit_code == 2
    assert run("check").exit_code == 2


@pytest.mark.parametrize("kind", ["m.onnx", "m.safetensors", "m.pt", "m"])
def test_a_pipe_is_2_at_once(tmp_path: Path, kind: str) -> None:
    if kind == "m.onnx":
        pytest.importorskip("onnx", reason="the extra [onnx] is not installed")
    os.mkfifo(tmp_path / kind)
    assert run("check", tmp_path / kind).exit_code == 2


@pytest.mark.parametrize(
    ("verb", "file", "hint"),
    [
        ("export", "dense.onnx", "ONNX is an output format"),
        ("export", "weights.pt", "a pickled checkpoint can run code"),
        ("check", "weights.bin", "twofour import"),
        ("check", "q.log", "name a .safetensors file, a folder or an .onnx file"),
        ("check", "net.py", "net:function"),
        ("advise", "q.log", "wanted  a .safetensors file or a folder in Hugging Face form"),
        ("check", "model.safetensors.index.json", "name the folder that holds it"),
        ("advise", "recipe.toml", "a recipe says how to prune"),
    ],
)
def test_another_kind_of_file_gets_a_hint_of_its_own(tmp_path: Path, verb: str, file: str, hint: str) -> None:
    (tmp_path / file).write_text("x")
    more = ("--to", "onnx", "--out", tmp_path / "out") if verb == "export" else ()
    found = run(verb, tmp_path / file, *more)
    assert found.exit_code == 2 and hint in found.stderr
    assert ("pickled" in found.stderr) == (file in ("weights.pt", "weights.bin"))


def test_the_root_of_an_error_is_shown(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "broken_half.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    (tmp_path / "broken_whole.py").write_text(
        "try:\n    import broken_half\nexcept RuntimeError as error:\n"
        "    raise ModuleNotFoundError('Could not import module BertModel\\nsecond line') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = run("advise", "broken_whole:make")
    assert "ModuleNotFoundError: Could not import module BertModel Because of RuntimeError" in found.stderr
    assert "torchvision::nms does not exist" in found.stderr and "second line" not in found.stderr
    assert explained(ValueError()) == "ValueError"


def test_kernels_of_keras_are_told_by_their_shape(tmp_path: Path) -> None:
    save_file({"conv": torch.ones(3, 3, 64, 128), "same": torch.ones(128, 64, 3, 3)}, tmp_path / "k.safetensors")
    report = checker.check(tmp_path / "k.safetensors", expect="2:4", include="*")
    notes = {found.name: " ".join(found.notes) for found in report.layers}
    skipped = dict(report.skipped)
    assert "(height, width, in, out)" in notes.get("conv", skipped.get("conv", ""))
    assert "(height, width" not in notes["same"]


@pytest.mark.parametrize(
    "code",
    ["def build():\n    raise SystemExit(0)\n", "import sys\nsys.exit(0)\n", LEAVES_IN_FORWARD],
    ids=["function", "module", "forward"],
)
def test_a_model_that_exits_is_no_verdict(tmp_path: Path, monkeypatch, code: str) -> None:
    (tmp_path / "leaves_at_once.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "leaves_at_once", raising=False)
    words = ["--machine", "a100-sxm", "--input", "16"] if code == LEAVES_IN_FORWARD else []
    found = run("estimate" if words else "check", "leaves_at_once:build", *words)
    assert found.exit_code == 2 and "SystemExit" in found.stderr


@pytest.mark.parametrize("name", ["m.safetensors", "config.json", "notes.txt", "list.json"])
def test_a_report_never_replaces_what_is_no_report(weights: Path, name: str) -> None:
    path = weights.with_name(name)
    if name != weights.name:
        path.write_text({"config.json": '{"model_type": "bert"}', "list.json": "[1]"}.get(name, "mine"))
    before = path.read_bytes()
    found = run("check", weights, "--json", path)
    assert found.exit_code == 2 and "is not overwritten" in found.stderr
    assert path.read_bytes() == before and not found.stdout


def test_a_report_replaces_an_earlier_one(weights: Path) -> None:
    report = weights.with_name("report.json")
    assert [run("check", weights, "--expect", "2:4", "--json", report).exit_code for _ in range(2)] == [1, 1]
    report.write_text("")
    assert run("check", weights, "--expect", "2:4", "--json", report).exit_code == 1 and report.stat().st_size


@pytest.mark.parametrize(
    "words, said",
    [
        (["advise", "leaves:build", "--threads", 99999999], "threads=99999999"),
        (["advise", "leaves:build", "--batch", 10**14], "a token count does not fit into memory"),
        (["estimate", "leaves:build", "--machine", "h200", "--input", "9" * 30], "the input is larger than memory"),
        (["estimate", "leaves:build", "--machine", "h200", "--length", 10**20], "the input is larger than memory"),
        (["estimate", "leaves:build", "--machine", "h200", "--batch", 10**20], "the input is larger than memory"),
        (["export", "leaves:sparse", "--to", "onnx", "--out", "x", "--input", f"{10**11}x16"], "larger than memory"),
        (["export", "leaves:sparse", "--to", "onnx", "--out", "x", "--input", "9" * 30], "larger than memory"),
        (["export", "leaves:words", "--to", "onnx", "--out", "x", "--length", 10**14], "larger than memory"),
        (["prune", "leaves:build", "--out", "/", "--force"], "/ cannot become the result's folder"),
        (["import", "leaves", "--out", "/", "--force"], "/ cannot become the result's folder"),
        (["demo", "--quick", "--seed", 10**30, "--out", "runs"], "the seed is impossible"),
    ],
)
def test_sizes_and_places_that_cannot_be_are_2_and_named(tmp_path: Path, monkeypatch, words, said: str) -> None:
    (tmp_path / "leaves.py").write_text(BUILDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "leaves", raising=False)
    found = run(*words)
    sys.modules.pop("leaves", None)
    assert found.exit_code == 2, found.output
    assert said in found.stderr and "fault of twofour" not in found.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".py") in ([], ["__pycache__"])
