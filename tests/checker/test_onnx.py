"""ONNX files: the constants of Conv, Gemm and MatMul, behind what they may be, along the axis that is summed over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import twofour
from tests.checker.small import damages, finding, pruned, random
from twofour import checker
from twofour.checkpoints import describe
from twofour.errors import FormatError, LayerError, TwofourError

onnx = pytest.importorskip("onnx", reason="the extra [onnx] is not installed")
helper, numpy_helper, TensorProto = onnx.helper, onnx.numpy_helper, onnx.TensorProto

CODES = {torch.float32: 1, torch.int8: 3, torch.uint8: 2, torch.float16: 10, torch.bfloat16: 16}
CODES |= {torch.float8_e4m3fn: 17, torch.float8_e5m2: 19, torch.float64: 11}


def constant(name: str, values: Tensor, code: int | None = None):
    raw = values.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return helper.make_tensor(name, code or CODES[values.dtype], values.shape, raw, raw=True)


def graph(nodes, constants, name: str = "g", **metadata: str):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", "y"))
    model = helper.make_model(helper.make_graph(nodes, name, [x], [y], constants))
    helper.set_model_props(model, metadata)
    return model


def checked(tmp_path: Path, nodes, constants, **options) -> checker.Report:
    path = tmp_path / "model.onnx"
    onnx.save_model(graph(nodes, constants), path)
    return twofour.check(path, **options)


def node(kind: str, *inputs: str, out: str = "y", **attributes):
    return helper.make_node(kind, list(inputs), [out], name=f"{kind}_{out}", **attributes)


OPERATORS = [
    ("Gemm", ("x", "w"), {"transB": 1}, (32, 64), 1, "gemm"),
    ("Gemm", ("x", "w"), {"transB": 0}, (64, 32), 0, "gemm"),
    ("Gemm", ("w", "x"), {}, (32, 64), 1, "gemm"),
    ("Gemm", ("w", "x"), {"transA": 1}, (64, 32), 0, "gemm"),
    ("MatMul", ("x", "w"), {}, (64, 32), 0, "matmul"),
    ("MatMul", ("w", "x"), {}, (32, 64), 1, "matmul"),
    ("MatMul", ("x", "w"), {}, (3, 64, 32), 1, "matmul"),
    ("Conv", ("x", "w"), {}, (32, 64, 3, 3), 1, "conv2d"),
    ("Conv", ("x", "w"), {"group": 2}, (32, 16, 5), 1, "conv1d"),
    ("ConvTranspose", ("x", "w"), {"group": 2}, (64, 16, 3, 3), 0, "conv_transpose2d"),
]


@pytest.mark.parametrize(("kind", "inputs", "attributes", "shape", "axis", "name"), OPERATORS)
def test_each_operator_sums_over_its_own_axis(tmp_path, kind, inputs, attributes, shape, axis, name) -> None:
    nodes = [node(kind, *inputs, **attributes)]
    report = checked(tmp_path, nodes, [constant("w", pruned(random(*shape), axis))], expect="2:4")
    found = report.layers[0]
    assert report.ok and (found.kind, found.reduction, found.promised_by) == (name, axis, "expect")
    other = {0: 1, 1: 0}[axis] if len(shape) != 3 or kind == "Conv" else 2
    report = checked(tmp_path, nodes, [constant("w", pruned(random(*shape), other))], expect="2:4")
    assert not report.ok and "along the wrong axis" in report.layers[0].verdict


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_types_in_raw_bytes_in_fields_and_outside(tmp_path, dtype: torch.dtype) -> None:
    weight = (pruned(random(16, 32), 1) * 20).to(dtype)
    nodes, path = [node("Gemm", "x", "w", transB=1)], tmp_path / "model.onnx"
    raw = constant("w", weight)
    onnx.save_model(graph(nodes, [raw]), path)
    in_bytes = twofour.check(path, expect="2:4")
    fields = numpy_helper.to_array(raw)
    fielded = helper.make_tensor("w", CODES[dtype], weight.shape, fields.flatten())
    assert not fielded.raw_data
    onnx.save_model(graph(nodes, [fielded]), path)
    in_fields = twofour.check(path, expect="2:4")
    model = graph(nodes, [constant("w", weight)])
    onnx.save_model(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    outside = twofour.check(path, expect="2:4")
    assert (tmp_path / "w.bin").stat().st_size >= weight.nbytes
    assert str(in_bytes) == str(in_fields) == str(outside) and in_bytes.ok


@pytest.mark.parametrize("code", [TensorProto.INT4, TensorProto.UINT4])
def test_four_bits_two_in_a_byte(tmp_path, code: int) -> None:
    whole = (pruned(random(16, 32), 1) * 3).round().clamp(-7, 7).to(torch.int8)
    point = 0 if code == TensorProto.INT4 else 8
    values = ((whole.to(torch.int16) + point) & 15).to(torch.uint8).flatten()
    packed = (values[::2] | values[1::2] << 4).numpy().tobytes()
    scale, zero = constant("s", torch.tensor(0.1)), helper.make_tensor("z", code, (), bytes([point]), raw=True)
    nodes = [node("DequantizeLinear", "w", "s", "z", out="d"), node("Gemm", "x", "d", transB=1)]
    report = checked(
        tmp_path, nodes, [helper.make_tensor("w", code, (16, 32), packed, raw=True), scale, zero], expect="2:4"
    )
    assert report.ok and report.layers[0].zeros == float((whole == 0).double().mean())


def quantised(weight: Tensor, points: Tensor) -> Tensor:
    return (weight * 20).round().clamp(-100, 100).to(torch.int16).add(points).to(torch.uint8)


@pytest.mark.parametrize("points", ["none", "one", "rows", "blocks"])
def test_behind_dequantise_a_zero_is_the_zero_point(tmp_path, points: str) -> None:
    weight = pruned(random(16, 32), 1)
    counted = torch.arange(110, 142, dtype=torch.int16)
    zero = {"one": torch.tensor(128, dtype=torch.int16), "rows": counted[:16], "blocks": counted.view(16, 2)}.get(
        points, torch.zeros((), dtype=torch.int16)
    )
    along = {"rows": lambda: zero[:, None], "blocks": lambda: zero.repeat_interleave(16, -1)}.get(points, lambda: zero)
    values = (weight * 20).to(torch.int8) if points == "none" else quantised(weight, along())
    axis = {"rows": {"axis": 0}, "blocks": {"axis": 1, "block_size": 16}}.get(points, {})
    given = () if points == "none" else ("z",)
    nodes = [
        node("DequantizeLinear", "w", "s", *given, out="d", **axis),
        node("Transpose", "d", out="t"),
        node("MatMul", "x", "t"),
    ]
    constants = [constant("w", values), constant("s", torch.tensor(0.05)), constant("z", zero.to(torch.uint8))]
    report = checked(tmp_path, nodes, constants, expect="2:4")
    found = report.layers[0]
    assert report.ok and (found.kind, found.reduction) == ("matmul", 1)
    assert "Q/DQ" in found.notes[0]
    assert {fit.reason for fit in found.fits if fit.runtime == "TensorRT"}.pop().endswith("(onnxsim#1764)")


def test_behind_quantise_and_dequantise_cast_and_identity(tmp_path) -> None:
    nodes = [
        node("Identity", "w", out="i"),
        node("QuantizeLinear", "i", "s", out="q"),
        node("DequantizeLinear", "q", "s", out="d"),
        node("Cast", "d", out="c", to=1),
        node("Conv", "x", "c"),
    ]
    report = checked(
        tmp_path,
        nodes,
        [constant("w", pruned(random(16, 16, 1, 1), 1)), constant("s", torch.tensor(0.1))],
        expect="2:4",
    )
    assert report.ok and report.layers[0].dtype == "float32"


def test_transposed_convolution_weights_are_judged_where_their_channels_stand(tmp_path) -> None:
    stored = pruned(random(3, 3, 32, 16), 2)  # kernel, in, out: as TensorFlow stores it
    nodes = [node("Transpose", "w", out="t", perm=[3, 2, 0, 1]), node("Conv", "x", "t")]
    report = checked(tmp_path, nodes, [constant("w", stored)], expect="2:4")
    assert report.ok and report.layers[0].reduction == 2
    report = checked(tmp_path, nodes, [constant("w", pruned(random(3, 3, 32, 16), 3))], expect="2:4")
    assert "lies along output channels" in report.layers[0].verdict


def test_one_constant_summed_over_along_both_axes_is_judged_for_each(tmp_path) -> None:
    nodes = [
        node("Gather", "w", "i", out="e"),
        node("Gemm", "e", "w", out="a", transB=1),
        node("Gemm", "a", "w", out="b"),
        node("MatMul", "b", "w", out="y"),
    ]
    constants = [constant("w", pruned(random(32, 32), 1)), helper.make_tensor("i", 7, (1,), [0])]
    report = checked(tmp_path, nodes, constants, expect="2:4")
    assert [(found.name, found.kept) for found in report.layers] == [("w (Gemm_a)", True), ("w (MatMul_y)", False)]


def test_constants_that_are_no_weights_get_a_reason(tmp_path) -> None:
    nodes = [
        node("Mul", "m", "m2", out="p"),
        node("MatMul", "x", "p", out="a"),
        node("Gather", "e", "i", out="g"),
        node("Conv", "x", "o", out="c"),
        node("MatMul", "a", "n", out="y"),
        node("DequantizeLinear", "d", "f", "f", out="dd"),
        node("MatMul", "y", "dd", out="z"),
    ]
    constants = [
        constant("m", random(16, 32)),
        constant("m2", torch.ones(())),
        constant("e", random(16, 32)),
        constant("o", random(16, 32)),
    ]
    constants += [constant("d", torch.ones(4, 4, dtype=torch.int8)), constant("f", torch.ones(()))]
    constants += [helper.make_tensor("i", 7, (1, 1), [0]), helper.make_tensor("n", 7, (4, 4), list(range(16)))]
    report = checked(tmp_path, nodes, constants)
    assert not report.layers and dict(report.skipped) == {
        "d": "its zero point is FLOAT, the weight INT8",
        "m": "`m` goes through Mul first, which is computed at run time",
        "e": "no operand of Conv, Gemm, MatMul or a recurrent operator",
        "o": "shape (16, 32) is no convolution weight",
        "i": "no operand of Conv, Gemm, MatMul or a recurrent operator",
        "n": "type INT64 is none that a weight is checked in",
    }


def test_graphs_inside_nodes_see_the_constants_around_them(tmp_path) -> None:
    def branch(name: str, own):
        output = helper.make_empty_tensor_value_info(f"{name}o")
        return helper.make_graph([node("MatMul", "x", name, out=f"{name}o")], name, [], [output], own)

    inner = [branch("w", []), branch("v", [constant("v", pruned(random(64, 32), 0))])]
    nodes = [
        node("Constant", out="c", value=constant("c", torch.ones(()).bool().to(torch.uint8), TensorProto.BOOL)),
        node("Constant", out="k", value=constant("k", pruned(random(32, 16), 0))),
        node("If", "c", out="b", then_branch=inner[0], else_branch=inner[1]),
        node("MatMul", "b", "k"),
    ]
    report = checked(tmp_path, nodes, [constant("w", pruned(random(64, 32), 0))], expect="2:4")
    assert report.ok and sorted(found.name for found in report.layers) == ["k", "v", "w"]


def test_promises_shapes_and_include(tmp_path) -> None:
    nodes = [node("MatMul", "x", "w", out="a"), node("MatMul", "a", "head")]
    constants, path = [constant("w", pruned(random(64, 32), 0)), constant("head", random(32, 10))], tmp_path / "m.onnx"
    onnx.save_model(graph(nodes, constants, **describe({"w": "2:4"}, {})), path)
    report = twofour.check(path)
    assert report.ok and report.layers[0].promised_by == "metadata"
    assert dict(report.skipped) == {"head": "(10, 32) is not a multiple of (8, 16) (ASP's rule)"}
    assert not twofour.check(path, expect="2:4", include="head").ok
    for options in ({"include": "gone"}, {"expect": {"gone": "2:4"}}, {"axes": {"w": 0}}):
        with pytest.raises(LayerError):
            twofour.check(path, **options)


BAD = {
    "too short": lambda t: setattr(t, "raw_data", t.raw_data[:-4]),
    "negative": lambda t: t.dims.__setitem__(0, -16),
    "huge": lambda t: t.dims.__setitem__(0, 1 << 40),
    "no type": lambda t: setattr(t, "data_type", 99),
}


@pytest.mark.parametrize("how", BAD)
def test_malformed_constants_are_refused(tmp_path, how: str) -> None:
    weight = constant("w", random(16, 32))
    BAD[how](weight)
    with pytest.raises(FormatError, match="malformed"):
        checked(tmp_path, [node("Gemm", "x", "w", transB=1)], [weight])


@pytest.mark.parametrize(
    "external",
    [{"location": "../up.bin"}, {"location": "/etc/hostname"}, {"location": "gone.bin"},
     {"location": "pipe.bin"}, {"location": ""}, {},
     {"location": "w.bin", "offset": "8"}, {"location": "w.bin", "length": "4"}, {"location": "w.bin", "offset": "-1"},
     {"location": "w.bin", "offset": "9" * 30}, {"location": "."}],
)  # fmt: skip
def test_external_data_that_is_not_there_is_refused(tmp_path, external: dict[str, str]) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(16 * 32 * 4))
    os.mkfifo(tmp_path / "pipe.bin")
    weight = constant("w", random(16, 32))
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in external.items():
        weight.external_data.add(key=key, value=value)
    with pytest.raises(FormatError):
        checked(tmp_path, [node("Gemm", "x", "w", transB=1)], [weight])


ODD = [
    ({}, constant("z", torch.ones(())), "zero point is FLOAT"),
    ({}, helper.make_tensor("z", TensorProto.INT32, (), [1]), "zero point is INT32"),
    ({"axis": [1, 2]}, constant("z", torch.ones(32, dtype=torch.int8)), "no whole numbers"),
    ({"block_size": [3]}, constant("z", torch.ones(16, 1, dtype=torch.int8)), "no whole numbers"),
]


@pytest.mark.parametrize(("attributes", "zero", "said"), ODD)
def test_zero_points_of_other_types_leave_a_weight_out(tmp_path, attributes, zero, said: str) -> None:
    nodes = [node("DequantizeLinear", "w", "s", "z", out="d", **attributes), node("Gemm", "x", "d", transB=1)]
    weight = constant("w", torch.ones(16, 32, dtype=torch.int8))
    report = checked(tmp_path, nodes, [weight, constant("s", torch.tensor(0.1)), zero])
    assert not report.layers and said in dict(report.skipped)["w"]


def test_a_block_larger_than_its_axis_takes_no_memory(tmp_path) -> None:
    nodes = [node("DequantizeLinear", "w", "s", "z", out="d", block_size=1 << 40), node("Gemm", "x", "d", transB=1)]
    weight, zero = torch.full((16, 32), 3, dtype=torch.int8), torch.full((16, 1), 3, dtype=torch.int8)
    report = checked(tmp_path, nodes, [constant("w", weight), constant("s", torch.ones(16, 1)), constant("z", zero)])
    assert report.layers[0].zeros == 1


def test_a_transpose_by_one_number_leaves_a_weight_out(tmp_path) -> None:
    nodes = [node("Transpose", "w", out="t", perm=1), node("MatMul", "x", "t")]
    assert "perm 1" in dict(checked(tmp_path, nodes, [constant("w", random(16, 32))]).skipped)["w"]


def test_files_that_are_no_models(tmp_path) -> None:
    path = tmp_path / "m.onnx"
    for content in (b"", b"\xff" * 100, b"not a model"):
        path.write_bytes(content)
        with pytest.raises(FormatError, match="not readable as ONNX"):
            twofour.check(path)
    with pytest.raises(FormatError, match="no such file"):
        twofour.check(tmp_path / "gone.onnx")


def test_a_name_that_is_no_text_is_refused(tmp_path) -> None:
    content = graph([node("MatMul", "x", "weight")], [constant("weight", random(8, 4))]).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(content.replace(b"weight", b"we\xffght"))
    with pytest.raises(FormatError, match=r"no UTF-8(.|\n)*ght"):
        twofour.check(tmp_path / "m.onnx")


def test_without_the_package_the_command_says_what_to_install(tmp_path) -> None:
    (tmp_path / "onnx.py").write_text("raise ImportError('no onnx here')")
    (tmp_path / "m.onnx").write_bytes(b"")
    command = [sys.executable, "-m", "twofour", "check", "m.onnx"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "needs the package onnx" in done.stderr and '"twofour[onnx]"' in done.stderr
    assert not done.stdout and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def valid() -> bytes:
    nodes = [
        node("DequantizeLinear", "q", "s", "z", out="d", axis=0),
        node("Transpose", "d", out="t", perm=[1, 0]),
        node("MatMul", "x", "t", out="a"),
        node("Conv", "a", "c", out="b", group=1),
        node("Gemm", "b", "w", transB=1),
    ]
    constants = [constant("q", torch.ones(8, 16, dtype=torch.uint8)), constant("s", torch.ones(8))]
    constants += [constant("z", torch.ones(8, dtype=torch.uint8)), constant("c", random(4, 8, 3, 3))]
    constants += [helper.make_tensor("w", 1, (4, 4), np.ones(16, dtype=np.float32))]
    return graph(nodes, constants, **describe({"w": "2:4"}, {})).SerializeToString()


@given(damage=damages(2500))
@settings(max_examples=400, deadline=None)
def test_damaged_onnx_files_are_checked_or_refused(valid: bytes, tmp_path_factory, damage) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.onnx"
    path.write_bytes(damage(valid))
    try:
        assert isinstance(str(twofour.check(path)), str)
    except TwofourError as error:
        assert str(error)


def test_a_node_without_an_output_is_still_a_product(tmp_path) -> None:
    nameless = helper.make_node("MatMul", ["x", "w"], [])
    assert checked(tmp_path, [nameless], [constant("w", pruned(random(64, 32), 0))], expect="2:4").ok


def test_a_constant_found_is_named_as_in_the_file(tmp_path) -> None:
    report = checked(tmp_path, [node("MatMul", "x", "w")], [constant("w", random(64, 32))])
    assert finding(report, "w").shape == (64, 32) and finding(report, "w").verdict == "dense"


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_promised_weight_that_is_computed_is_not_kept(tmp_path: Path, steps: int, turned: bool) -> None:
    weight, one = pruned(random(64, 32), 1), torch.ones(64, 32)
    names = ["w", *(f"w{step}" for step in range(1, steps + 1))]
    nodes = [node("Add", names[step], "one", out=names[step + 1]) for step in range(steps)]
    if turned:
        nodes.append(node("Transpose", names[-1], out="t"))
    nodes.append(node("Gemm", "x", "t" if turned else names[-1], out="h", transB=int(not turned)))
    nodes.append(node("Gemm", "h", "v", transB=1))
    constants = [constant("w", weight), constant("one", one), constant("v", pruned(random(64, 64), 1))]
    report = checked(tmp_path, nodes, constants, expect="2:4")
    lost = finding(report, "w")
    assert not report.ok and not lost.kept and not lost.sparse and not lost.fits and lost.promised_by == "expect"
    assert "cannot be judged: `w` goes through Add first" in lost.verdict
    assert "1 of 2 promised weights kept" in report.summary and "w" not in dict(report.skipped)
    assert finding(report, "v").kept
    free = checked(tmp_path, nodes, constants)
    assert free.ok and "goes through Add first" in dict(free.skipped)["w"], "nothing was promised of it"


def test_what_is_computed_from_an_input_is_no_weight(tmp_path: Path) -> None:
    weight = pruned(random(64, 64), 1)
    nodes = [node("Mul", "w", "x", out="h"), node("Gemm", "x", "h", out="g"), node("Gemm", "g", "v", transB=1)]
    report = checked(tmp_path, nodes, [constant("w", weight), constant("v", weight)], expect="2:4")
    assert report.ok and "w" in dict(report.skipped)


def _recurrent(kind: str, *before, r: str = "r", constants=(), **options):
    """Return nodes and constants of a recurrent operator: W is (1, 32, 64), R is what `before` makes."""
    numbers = {"zero": [0], "one": [1], "half": [16], "end": [32], "two": [2]}
    whole = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in numbers.items()]
    last = node(kind, "x", "w", r, hidden_size=8, **options)
    return [*before, last], [constant("w", pruned(random(1, 32, 64), 2)), *constants, *whole]


def test_recurrent_operators_read_rows_that_are_laid_out(tmp_path: Path) -> None:
    before = [
        node("Slice", "h", "zero", "half", "zero", out="upper"),
        node("Slice", "h", "half", "end", "zero", out="lower"),
        node("Concat", "lower", "upper", out="turned", axis=0),
        node("Unsqueeze", "turned", "zero", out="r"),
    ]
    held = [constant("h", pruned(random(32, 16), 1))]
    for kind in ("LSTM", "GRU", "RNN"):
        report = checked(tmp_path, *_recurrent(kind, *before, constants=held), expect={"w": "2:4", "h": "2:4"})
        assert report.ok and [found.kind for found in report.layers] == [kind.lower()] * 2
        assert [(found.name, found.axis, found.reduction) for found in report.layers] == [
            ("w", "in = 64", 2),
            ("h", "in = 16", 1),
        ]
    across = [constant("h", pruned(random(32, 16), 0))]
    report = checked(tmp_path, *_recurrent("LSTM", *before, constants=across), expect={"h": "2:4"})
    assert not report.ok and "wrong axis" in finding(report, "h").verdict


@pytest.mark.parametrize(
    "before",
    [
        [node("Slice", "h", "zero", "half", "two", out="r")],
        [node("Concat", "h", "h", out="r", axis=2)],
        [node("Slice", "h", "zero", "half", "x", out="r")],
        [node("Unsqueeze", "h", "two", out="r")],
        [node("Neg", "h", out="r")],
        [node("Slice", "h", "zero", "half", "e", out="r")],
    ],
    ids=["columns cut", "columns joined", "axes of an input", "an axis inside", "computed", "axes that are no numbers"],
)
def test_what_else_becomes_a_recurrent_weight_is_not_judged(tmp_path: Path, before) -> None:
    held = [constant("h", pruned(random(1, 32, 16), 2)), constant("e", random(2))]
    report = checked(tmp_path, *_recurrent("GRU", *before, constants=held))
    assert [found.name for found in report.layers] == ["w"]
    assert dict(report.skipped)["h"]
