"""twofour check of files: what the options name, exit codes, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checker.small import pruned, random
from tests.cli.small import refused


def test_axis_and_include_name_weights_of_a_bare_file(run) -> None:
    save_file({"a.c_fc.weight": pruned(random(16, 32), 0), "b.weight": random(16, 32)}, "w.safetensors")
    result = run(
        "check", "w.safetensors", "--expect", "2:4", "--include", "a.*", "--axis", "*.c_fc=0", "--json", "r.json"
    )
    assert result.exit_code == 0 and "1 of 1 promised weights kept" in result.stdout
    content = json.loads(Path("r.json").read_text())
    (layer,) = content["layers"]
    assert (layer["kind"], layer["reduction"], layer["promised_by"], layer["ties"]) == ("hf_conv1d", 0, "expect", 0)
    assert all(fit["source"] for fit in layer["fits"])
    assert run("check", "w.safetensors", "--expect", "2:4", "--axis", "1").exit_code == 1
    refused(run("check", "w.safetensors", "--axis", "2"), "--axis 2 cannot be read", '"GLOB=0"')
    refused(run("check", "w.safetensors", "--include", "gone"), "names no weight", "a.c_fc.weight")
    refused(run("check", "zoo_cli:small", "--axis", "0"), "are for files of weights")


def test_runtimes_name_the_source_of_their_rules(run) -> None:
    save_file({"w.weight": pruned(random(16, 32), 1)}, "w.safetensors")
    shown = run("check", "w.safetensors", "--runtimes").stdout
    assert "_DTYPE_SHAPE_CONSTRAINTS" in shown and "NVIDIA/TensorRT#3849" in shown and "source of its rule" in shown


@pytest.mark.parametrize(("axis", "code"), [(0, 0), (1, 1)])
def test_an_onnx_file_keeps_or_breaks(run, axis: int, code: int) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra [onnx] is not installed")
    weight = pruned(random(32, 16), axis).numpy()
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [], [], [onnx.numpy_helper.from_array(weight, "w")])
    onnx.save_model(onnx.helper.make_model(graph), "m.onnx")
    result = run("check", "m.onnx", "--expect", "2:4")
    assert result.exit_code == code and ("along the wrong axis" in result.stdout) == bool(code)
    Path("m.onnx").write_bytes(b"\xff" * 64)
    refused(run("check", "m.onnx"), "FormatError: the file is not readable as ONNX")


def test_types_of_eight_bits_are_checked(run) -> None:
    save_file({"w.weight": (pruned(random(16, 32), 1) * 9).to(torch.float8_e4m3fn)}, "w.safetensors")
    assert run("check", "w.safetensors", "--expect", "2:4").exit_code == 0
