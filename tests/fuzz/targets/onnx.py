"""ONNX files: which of their constants are weights, and whether those keep what is promised of them."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper

import twofour
from tests.fuzz.cursor import Cursor, edit_bytes
from tests.fuzz.shelf import put
from tests.fuzz.wire import edited
from twofour.checkpoints import describe

TRACED = ("twofour.checker", "twofour.checkpoints", "twofour.files")
SEEDS = tuple(bytes([kind]) for kind in range(4))

TEXTS = (b"", b"w", b"x", b"y", b"d", b"t", b"MatMul", b"Gemm", b"Conv", b"ConvTranspose", b"If", b"Constant", b"perm")
TEXTS += (b"Transpose", b"DequantizeLinear", b"QuantizeLinear", b"Cast", b"QLinearConv", b"MatMulInteger", b"axis")
TEXTS += (b"\xff\xfe", b"location", b"offset", b"length", b"../w.bin", b"/etc/passwd", b"w.bin", b"a" * 300, b"-1")
TEXTS += (b"group", b"transB", b"block_size", b"value", b"ai.onnx", b"twofour.patterns", b'{"w": "2:4"}', b"9" * 18)


@cache
def good(kind: int) -> bytes:
    """Return a model: a product, one behind Q/DQ, a convolution inside a branch, or one with its weight outside."""
    weight = np.tile(np.array([1, 0, 0, 2], dtype=np.float32), (8, 2))
    constant = helper.make_tensor("w", TensorProto.FLOAT, (8, 8), weight.tobytes(), raw=True)
    nodes, constants, promised = [_node("Gemm", "x", "w", transB=1)], [constant], {"w": "2:4"}
    if kind == 1:
        parts = {"DequantizeLinear": ("q", "s", "z"), "Transpose": ("d",)}
        nodes = [_node("DequantizeLinear", *parts["DequantizeLinear"], out="d", axis=0)]
        nodes += [_node("Transpose", "d", out="t", perm=[1, 0]), _node("MatMul", "x", "t")]
        constants = [helper.make_tensor("q", TensorProto.UINT8, (8, 8), weight.astype(np.uint8).tobytes(), raw=True)]
        constants += [helper.make_tensor("s", TensorProto.FLOAT, (8,), np.ones(8, np.float32))]
        constants += [helper.make_tensor("z", TensorProto.UINT8, (8,), bytes(8), raw=True)]
        promised = {}
    elif kind == 2:
        inner = helper.make_tensor("w", TensorProto.FLOAT16, (4, 4, 3), np.ones(48, np.float16).tobytes(), raw=True)
        branch = helper.make_graph([_node("Conv", "x", "w", out="b", group=2)], "inner", [], [], [inner])
        nodes = [_node("If", "x", then_branch=branch, else_branch=branch), _node("MatMul", "x", "c")]
        nodes += [_node("Constant", out="c", value=constant)]
        constants, promised = [], {}
    elif kind == 3:
        constant.ClearField("raw_data")
        constant.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "w.bin"), ("offset", "4"), ("length", "256")):
            constant.external_data.add(key=key, value=value)
    model = helper.make_model(helper.make_graph(nodes, "g", [], [], constants))
    helper.set_model_props(model, describe(promised, {}))
    return model.SerializeToString()


def _node(kind: str, *inputs: str, out: str = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, list(inputs), [out], **attributes)


def build(data: bytes) -> bytes:
    """Return the file."""
    cursor = Cursor(data)
    whole = good(cursor.number(4))
    for _ in range(6):
        if cursor.empty:
            break
        whole = edit_bytes(cursor, whole) if cursor.number(16) == 0 else edited(cursor, whole, TEXTS)
    return whole


@cache
def external() -> None:
    """Put the file beside the models that one of them has its weight in."""
    put("w.bin", bytes(4) + np.tile(np.array([1, 0, 0, 2], dtype=np.float32), (8, 2)).tobytes())


def run(built: bytes) -> str:
    """Check it: no promise is kept by a weight that was not looked at."""
    external()
    report = twofour.check(put("model.onnx", built))
    assert all(0 <= finding.legal_fraction <= 1 for finding in report.layers)
    return "kept" if report.ok else "read"
