"""The execution provider: ONNX Runtime's own answers, by our kernels, of an ordinary file; what it leaves, and why."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.turns import in_turn
from twofour.errors import ExportError
from twofour.export.onnxruntime import NAME, add_provider, provider, register
from twofour.export.runtime import library

onnx = pytest.importorskip("onnx", reason="the extra [onnx] is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra [onnx] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

from onnx import TensorProto, helper  # noqa: E402

from tests.export.onnx_graphs import (  # noqa: E402
    ACTIVATIONS,
    exported,
    feed_of,
    graph,
    node,
    normed,
    numbers,
    product,
    require_same,
    scalar,
    session,
    sparse,
)

ROOT = Path(__file__).parent.parent.parent


@in_turn("opset", [13, 17, 21])
@in_turn("size", [(64, 72), (36, 130), (260, 33), (4, 1024)])
def test_matmul_of_any_size_and_rank(opset: int, size: tuple[int, int]) -> None:
    inputs, outputs = size
    file = product(node("Add", "mm bias", "y"), inputs=inputs, outputs=outputs, opset=opset, bias=numbers(outputs))
    feeds = [{"x": numbers(*leading, inputs)} for leading in ((1, 1), (2, 5), (3, 43), (1, 0), (0, 7))]
    assert require_same(file, *feeds) == [["Add", "MatMul"]]


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_ranks_of_an_input(rank: int) -> None:
    sizes = (2, 3, 5, 64)[4 - rank :]
    file = graph([node("MatMul", "x w", "y")], {"x": [None] * rank}, ["y"], {"w": sparse(64, 96)})
    assert require_same(file, {"x": numbers(*sizes)}) == [["MatMul"]]


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("bias", [(80,), (1, 80), None])
def test_gemm(turned: int, bias: tuple[int, ...] | None) -> None:
    weight = sparse(64, 80)
    constants = {"w": weight.T.copy() if turned else weight, **({"c": numbers(*bias)} if bias else {})}
    nodes = [node("Gemm", "x w c" if bias else "x w", "g", transB=turned), node("Relu", "g", "y")]
    file = graph(nodes, {"x": [None, 64]}, ["y"], constants)
    assert require_same(file, {"x": numbers(17, 64)}, {"x": numbers(1, 64)}) == [["Gemm", "Relu"]]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_join_their_product(name: str) -> None:
    nodes, constants = ACTIVATIONS[name]
    file = product(node("Add", "bias mm", "b"), *nodes, opset=20, bias=numbers(72), **constants)
    (part,) = require_same(file, {"x": numbers(2, 9, 64)})
    assert len(part) >= 3  # ONNX Runtime may have made one Gelu of a formula


def test_a_formula_that_is_no_gelu_stays() -> None:
    nodes, constants = ACTIVATIONS["erf, v first"]
    file = product(
        node("Add", "bias mm", "b"), *nodes, opset=20, bias=numbers(72), **{**constants, "half": scalar(0.25)}
    )
    assert require_same(file, {"x": numbers(2, 9, 64)}) == [["Add", "MatMul"]]


@pytest.mark.parametrize("residual", [(2, 9, 72), (1, 9, 72), (2, 1, 1), (9, 72), (4, 9, 72)])
def test_residuals_and_norms_join_whatever_is_repeated(residual: tuple[int, ...]) -> None:
    batch = 1 if residual[0] == 4 else 2
    residual = residual if len(residual) == 3 else (1, *residual)
    part = require_same(normed(), {"x": numbers(batch, 9, 64), "r": numbers(*residual)})
    assert part == [["Add", "Add", "LayerNormalization", "MatMul"]]


def test_a_sum_that_others_read_leaves_beside_its_norm() -> None:
    file = normed(node("Mul", "sum y", "both"), outputs=("both", "sum"))
    feed = {"x": numbers(2, 9, 64), "r": numbers(2, 9, 72)}
    assert require_same(file, feed) == [["Add", "Add", "LayerNormalization", "MatMul"]]


def test_two_products_in_a_row_are_one_part_where_nothing_else_reads_between() -> None:
    nodes = [node("MatMul", "x w", "h"), node("Relu", "h", "r"), node("MatMul", "r v", "m"), node("Add", "m x", "y")]
    constants = {"w": sparse(64, 128), "v": sparse(128, 64)}
    feeds = [{"x": numbers(rows, 64)} for rows in (1, 300, 0)]
    assert require_same(graph(nodes, {"x": [None, 64]}, ["y"], constants), *feeds) == [
        ["Add", "MatMul", "MatMul", "Relu"]
    ]
    parts = require_same(graph(nodes, {"x": [None, 64]}, ["y", "r"], constants), *feeds)
    assert parts == [["Add", "MatMul"], ["MatMul", "Relu"]]


@pytest.mark.parametrize(("between", "inputs"), [(128, 64), (64, 128)])
def test_two_products_between_which_rows_change_stay_two(between: int, inputs: int) -> None:
    nodes = [
        *(node("Gemm", "x w", "h"), node("Relu", "h", "r"), node("Reshape", "r rows", "f")),
        node("Gemm", "f v", "y"),
    ]
    constants = {"w": sparse(64, between), "v": sparse(inputs, 64), "rows": np.array([-1, inputs])}
    parts = require_same(graph(nodes, {"x": [None, 64]}, ["y"], constants), {"x": numbers(6, 64)})
    assert sorted(part.count("Gemm") for part in parts) == [1, 1]


def test_sums_of_products_and_of_a_product_with_itself() -> None:
    weights = {"w": sparse(64, 64), "v": sparse(64, 64)}
    nodes = [node("MatMul", "x w", "a"), node("MatMul", "x v", "b"), node("Add", "a b", "y"), node("Add", "y y", "z")]
    file = graph(nodes, {"x": [None, 64]}, ["y", "z"], weights)
    assert require_same(file, {"x": numbers(5, 64)}) == [["Add", "MatMul"], ["MatMul"]]


def test_weights_inside_branches_and_values_that_branches_read() -> None:
    def branch(name: str, kind: str) -> Any:
        nodes = [node("MatMul", "h w", f"{name}m"), node(kind, f"{name}m", f"{name}y")]
        out = helper.make_tensor_value_info(f"{name}y", TensorProto.FLOAT, None)
        return helper.make_graph(nodes, name, [], [out])

    nodes = [
        *(node("MatMul", "x w", "h"), node("Relu", "h", "r"), node("ReduceSum", "r", "s", keepdims=0)),
        *(
            node("Greater", "s zero", "c"),
            node("If", "c", "y", then_branch=branch("t", "Abs"), else_branch=branch("e", "Neg")),
        ),
    ]
    file = graph(nodes, {"x": [None, 64]}, ["y"], {"w": sparse(64, 64), "zero": scalar(0)})
    assert ["MatMul"] in require_same(file, {"x": numbers(5, 64)}, {"x": numbers(5, 64) * 0})


def test_a_weight_that_a_caller_may_replace_is_no_constant() -> None:
    file = graph([node("MatMul", "x w", "y")], {"x": [None, 64], "w": [64, 64]}, ["y"], {"w": sparse(64, 64)})
    assert require_same(file, {"x": numbers(5, 64)}, {"x": numbers(5, 64), "w": numbers(64, 64)}) == []


def test_what_is_not_claimed_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    weights = {
        "dense": numbers(64, 72),
        "halves": sparse(64, 72).astype(np.float64),
        "odd": np.where(np.arange(66)[:, None] % 2, 0, numbers(66, 72)),
        "few": sparse(16, 16),
    }
    nodes = [
        node("MatMul", "x dense", "a", name="dense"),
        *(node("Cast", "x", "x64", to=TensorProto.DOUBLE), node("MatMul", "x64 halves", "h", name="halves")),
        *(
            node("Cast", "h", "b", to=TensorProto.FLOAT),
            node("Pad", "x pads", "wide"),
            node("MatMul", "wide odd", "c", name="odd"),
        ),
        *(node("Slice", "x zero sixteen two", "narrow"), node("MatMul", "narrow few", "d", name="few")),
        node("MatMul", "x good", "e"),
    ]
    whole = {
        "pads": np.array([0, 0, 0, 2], np.int64),
        "zero": np.array([0]),
        "sixteen": np.array([16]),
        "two": np.array([1]),
    }
    constants = {**weights, "good": sparse(64, 72), **whole}
    file = graph(nodes, {"x": [None, 64]}, list("abcde"), constants)
    options = ort.SessionOptions()
    options.log_severity_level = 1
    made = ort.InferenceSession(file, add_provider(options))
    text = capfd.readouterr().err
    for name, why in (
        ("dense", "is not 2:4 along the axis summed over"),
        ("halves", "its weight is not float32"),
        ("odd", "has no groups of four"),
        ("few", "is too small to gain"),
    ):
        (line,) = (line for line in text.splitlines() if f"MatMul `{name}`" in line)
        assert why in line
    assert "1 nodes run here" in text and len(made.run(None, {"x": numbers(3, 64)})) == 5
    assert require_same(file, {"x": numbers(3, 64)}) == [["MatMul"]]


def test_a_model_without_zeros_is_left_with_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    file = graph([node("MatMul", "x w", "y")], {"x": [None, 64]}, ["y"], {"w": numbers(64, 72)})
    assert require_same(file, {"x": numbers(3, 64)}) == []
    assert "no weight of this graph is 2:4" in capfd.readouterr().err


def test_threads_at_once_and_sessions_that_end() -> None:
    file = exported("written out")
    feed = feed_of(file, 2, 33, 33)
    wanted = ort.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, feed)[0]
    made = session(file, threads=2)
    answers: list[np.ndarray] = []
    callers = [threading.Thread(target=lambda: answers.append(made.run(None, feed)[0])) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(answers) == 4
    for answer in answers:
        np.testing.assert_allclose(answer, wanted, atol=1e-5)


def test_wrong_inputs_are_errors_of_a_run() -> None:
    file = graph([node("MatMul", "x w", "y")], {"x": [None, None]}, ["y"], {"w": sparse(64, 72)})
    made = session(file)
    with pytest.raises(Exception, match="a product of inputs"):
        made.run(None, {"x": numbers(3, 60)})
    assert made.run(None, {"x": numbers(3, 64)})[0].shape == (3, 72)
    made, feed = session(exported("written out")), feed_of(exported("written out"), 2, 9, 9)
    with pytest.raises(Exception, match="do not go together"):
        made.run(None, {**feed, "mask": feed["mask"][..., :7]})
    assert made.run(None, feed)[0].shape == (2, 9, 64)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_c_program_without_python(tmp_path: Path) -> None:
    source, built = ROOT / "examples" / "onnxruntime" / "run.c", tmp_path / "run"
    flags = ["-std=c99", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    subprocess.run(["cc", *flags, source, "-o", built, "-ldl", "-lm"], check=True)
    (tmp_path / "model.onnx").write_bytes(exported("written out"))
    (own,) = Path(ort.__file__).parent.glob("capi/libonnxruntime.so.*")
    command = [built, own, library(), tmp_path / "model.onnx", "--size", "9", "--runs", "3", "--threads", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with twofour" in done.stdout
    largest, difference = re.findall(r"[\d.e+-]+$|(?<=answer )[\d.e+-]+", done.stdout.splitlines()[-1])
    assert float(difference) <= 1e-5 * float(largest)
    missing = subprocess.run(
        [built, own, tmp_path / "none.so", *command[3:]], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 1 and "register: " in missing.stderr


def test_every_wheel_of_the_plug_in_says_the_name_that_the_library_has() -> None:
    source = ROOT / "packages" / "onnxruntime-ep-twofour" / "onnxruntime_ep_twofour" / "__init__.py"
    made = importlib.util.spec_from_file_location("plugin", source)
    assert made and made.loader
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    assert module.get_ep_names() == [module.get_ep_name()] == [device.ep_name for device in register()]


@pytest.mark.long
def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "onnxruntime.md").read_text()
    monkeypatch.chdir(tmp_path)
    here, package = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(here, {})
    providers, difference = capsys.readouterr().out.splitlines()
    assert NAME in providers and float(difference) < 1e-5
    shutil.copytree(ROOT / "packages" / "onnxruntime-ep-twofour", tmp_path / "packages")  # as its wheel lays it out
    (tmp_path / "packages" / "onnxruntime_ep_twofour" / "libtwofour.so.1").symlink_to(library())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    program = f"{package}\nprint(session.get_providers())"
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert NAME in run.stdout, run.stderr


def test_threads_of_onnx_runtime_do_not_spin_beside_ours(capfd: pytest.CaptureFixture[str]) -> None:
    def spinning(options: Any) -> str | None:
        try:
            return options.get_session_config_entry(provider.SPINNING)
        except RuntimeError:
            return None

    asked = ort.SessionOptions()
    asked.add_session_config_entry(provider.SPINNING, "1")
    assert spinning(add_provider(asked, threads=2)) == "1"
    assert spinning(add_provider(ort.SessionOptions(), threads=2)) == "0"
    assert spinning(add_provider(ort.SessionOptions(), threads=1)) is None
    file = graph([node("MatMul", "x w", "y")], {"x": [None, 64]}, ["y"], {"w": sparse(64, 72)})
    ort.InferenceSession(file, asked)
    assert "allow_spinning` to" in capfd.readouterr().err
    session(file, threads=2)
    assert "allow_spinning" not in capfd.readouterr().err


def test_registering_again_and_impossible_threads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [device.ep_name for device in register()] == [device.ep_name for device in register()] == [NAME]
    for threads in (0, 1025, True, "2"):
        with pytest.raises(ExportError, match="`threads` is impossible"):
            add_provider(ort.SessionOptions(), threads=threads)
    options = ort.SessionOptions()
    options.add_provider_for_devices(register(), {"threads": "many"})
    file = graph([node("MatMul", "x w", "y")], {"x": [None, 64]}, ["y"], {"w": sparse(64, 72)})
    assert NAME not in ort.InferenceSession(file, options).get_providers()  # ONNX Runtime says why, and goes on without
    assert "the option `threads` is 'many'" in capsys.readouterr().out
    for version in ("1.22.1", "1.23.0"):
        monkeypatch.setattr(ort, "__version__", version)
        with pytest.raises(ExportError, match="takes no provider from outside"):
            provider.register()


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer keeps freed memory")
def test_dense_weights_are_released(tmp_path: Path) -> None:
    """A session leaves the packed weight in memory (values, a quarter of a byte of indices each), not the dense one."""
    inputs, outputs = 4096, 4096
    constant = {"w": sparse(inputs, outputs)}
    (tmp_path / "model.onnx").write_bytes(graph([node("MatMul", "x w", "y")], {"x": [1, inputs]}, ["y"], constant))
    code = """
import ctypes, sys
import onnxruntime
from twofour.export.onnxruntime import add_provider

def resident():
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096

small, large = sys.argv[1:]
def made(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, add_provider(options))

first = made(small)  # what the runtime and the library take once
before = resident()
second = made(large)
print(resident() - before)
"""
    (tmp_path / "small.onnx").write_bytes(product(inputs=64, outputs=64))
    command = [sys.executable, "-c", code, tmp_path / "small.onnx", tmp_path / "model.onnx"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    dense = inputs * outputs * 4
    print(f"{int(done.stdout) / 1e6:.1f} MB are left of {dense / 1e6:.1f} dense")
    assert int(done.stdout) < dense
