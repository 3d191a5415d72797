"""ONNX graphs of products and encoder layers, changed, through our provider: what runs without it runs, and alike."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from tests.export.onnx_graphs import ACTIVATIONS, exported, node, normed, numbers, product, session, sparse
from tests.fuzz.cursor import Cursor, edit_bytes
from tests.fuzz.wire import edited

TRACED = ("twofour.export.onnxruntime",)
SEEDS = tuple(bytes([kind]) for kind in range(8))

KINDS = (
    "MatMul",
    "Gemm",
    "Add",
    "Mul",
    "Sub",
    "Div",
    "Relu",
    "Sigmoid",
    "Erf",
    "Sqrt",
    "Softmax",
    "Transpose",
    "Identity",
)
KINDS += ("Reshape", "Gelu", "LayerNormalization", "Where", "Cast", "Concat", "Gather", "Shape", "Unsqueeze", "Pow")
SIZES = (-2, -1, 0, 1, 2, 3, 4, 9, 16, 64, 72, 128, 1 << 31, 1 << 40)
NUMBERS = (0.0, 0.25, 0.5, 1.0, 1.4142135381698608, 2.0, -1.0, 1e-12, 1e30, float("inf"), float("nan"))
FREE = {0: 2, 1: 9, 2: 72}
"""Sizes of a free axis, by its place; another is 9."""
TEXTS = (b"", b"x", b"w", b"y", b"mm", b"MatMul", b"Gemm", b"Softmax", b"axis", b"ai.onnx", b"tanh", b"a" * 300)
MOST = 1 << 20
"""Numbers in an input at most."""
AGREE = 1e-3
"""Largest difference, of the largest answer: changed graphs may cancel what they add."""


@cache
def good() -> tuple[bytes, ...]:
    """Return the graphs that are changed."""
    nodes, constants = ACTIVATIONS["erf, v first"]
    gelu = product(node("Add", "bias mm", "b"), *nodes, opset=20, bias=numbers(72), **constants)
    second = [node("Relu", "mm", "r"), node("MatMul", "r w2", "y")]
    row = product(*second, w2=sparse(72, 64))
    layers = [exported(form, free) for form, free in (("written out", True), ("sdpa", True), ("places", False))]
    return (product(), gelu, row, normed(), *layers, exported("cross"))


def build(data: bytes) -> bytes:
    """Return the file."""
    cursor = Cursor(data)
    whole = cursor.pick(good())
    model = onnx.load_from_string(whole)
    for _ in range(4):
        if cursor.empty:
            return model.SerializeToString()
        _change(cursor, model.graph)
    whole = model.SerializeToString()
    return edit_bytes(cursor, whole) if cursor.number(8) == 7 else edited(cursor, whole, TEXTS)


def _change(cursor: Cursor, graph: Any) -> None:
    """Change a node, an operand, an attribute, a constant, an input, the outputs; or drop or double a node."""
    action, nodes = cursor.number(9), graph.node
    names = [name for one in nodes for name in (*one.input, *one.output)] or ["x"]
    one = nodes[cursor.number(256) % len(nodes)] if nodes else node("Identity", "x", "y")
    if action == 0:
        one.op_type = cursor.pick(KINDS)
    elif action in (1, 2) and one.input:
        one.input[cursor.number(len(one.input))] = names[cursor.number(1 << 16) % len(names)]
    elif action == 3 and one.attribute:
        _attribute(cursor, one.attribute[cursor.number(len(one.attribute))])
    elif action in (4, 5) and graph.initializer:
        _constant(cursor, graph.initializer[cursor.number(256) % len(graph.initializer)])
    elif action == 6 and graph.input:
        dims = graph.input[cursor.number(len(graph.input))].type.tensor_type.shape.dim
        if dims:
            dims[cursor.number(len(dims))].dim_value = cursor.pick((1, 2, 3, 9, 64))
    elif action == 7:
        kind = graph.output.add()
        kind.CopyFrom(
            helper.make_tensor_value_info(names[cursor.number(1 << 16) % len(names)], TensorProto.FLOAT, None)
        )
    elif nodes:
        nodes.remove(one) if cursor.number(2) else nodes.append(_twin(one))


def _twin(one: Any) -> Any:
    found = onnx.NodeProto()
    found.CopyFrom(one)
    found.name = f"{found.name}_twin"
    for place, name in enumerate(found.output):
        found.output[place] = f"{name}_twin"
    return found


def _attribute(cursor: Cursor, one: Any) -> None:
    if one.type == onnx.AttributeProto.INT:
        one.i = cursor.pick(SIZES)
    elif one.type == onnx.AttributeProto.FLOAT:
        one.f = cursor.pick(NUMBERS)
    elif one.type == onnx.AttributeProto.INTS and one.ints:
        one.ints[cursor.number(len(one.ints))] = cursor.pick(SIZES[:8])
    elif one.type == onnx.AttributeProto.TENSOR:
        _constant(cursor, one.t)


def _constant(cursor: Cursor, one: Any) -> None:
    """Change a number of a constant, its shape or its type; or let it be of no 2:4 pattern, or of zeros alone."""
    value = numpy_helper.to_array(one).copy()
    action = cursor.number(6)
    if action == 0 and value.size:
        numbers = NUMBERS if value.dtype.kind == "f" else SIZES
        value.reshape(-1)[cursor.number(1 << 16) % value.size] = np.asarray(cursor.pick(numbers)).astype(value.dtype)
    elif action == 1:
        value = value.reshape(-1) if cursor.number(2) else value[None]
    elif action == 2 and value.ndim:
        value = value[: cursor.number(4)]
    elif action == 3 and value.ndim == 2:
        value = np.ascontiguousarray(value.T)
    elif action == 4:
        value = value.astype(cursor.pick(("float16", "float64", "int64", "int32", "float32")))
    elif action == 5:
        value = value * 0
    one.CopyFrom(numpy_helper.from_array(value, one.name))


def run(built: bytes) -> str:
    """Run it on ONNX Runtime alone and with the provider: a graph that runs there runs with it, and answers the same.

    A run that ONNX Runtime refuses may end in an answer: a sum that is left out is not looked at.
    """
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        alone = ort.InferenceSession(built, options, providers=["CPUExecutionProvider"])
        feed = _feed(alone)
    except Exception:  # of many kinds, none of which is this package's
        return "no graph"
    if feed is None:
        return "large"
    ours = session(built)  # a graph of the runtime's is one with the provider too
    try:
        wanted = alone.run(None, feed)
    except Exception:
        _try(ours, feed)
        return "no run"
    found = ours.run(None, feed)
    claimed = any(part.ep_name != "CPUExecutionProvider" for part in ours.get_provider_graph_assignment_info())
    for name, one, other in zip([entry.name for entry in alone.get_outputs()], wanted, found, strict=True):
        _require_like(name, one, other)
    return "ours" if claimed else "theirs"


def _try(ours: Any, feed: dict[str, Any]) -> None:
    try:
        ours.run(None, feed)
    except Exception as error:
        assert str(error), "a refusal without a reason"


def _require_like(name: str, wanted: Any, found: Any) -> None:
    if not isinstance(wanted, np.ndarray) or wanted.dtype.kind != "f":
        assert np.array_equal(np.asarray(wanted), np.asarray(found)), name
        return
    assert wanted.shape == found.shape and wanted.dtype == found.dtype, (name, wanted.shape, found.shape)
    known = np.isfinite(wanted)
    largest = np.abs(wanted[known]).max(initial=1)
    if largest < 1e6:  # beyond, sums of other orders end elsewhere
        assert np.isfinite(found[known]).all() and np.abs(wanted - found)[known].max(initial=0) <= AGREE * largest, name


def _feed(made: Any) -> dict[str, Any] | None:
    """Return inputs of the sizes that a session asks for, None where they are large or of types that are not made."""
    draw, feed = np.random.default_rng(0), {}
    for entry in made.get_inputs():
        shape = [size if isinstance(size, int) else FREE.get(place, 9) for place, size in enumerate(entry.shape)]
        if entry.type != "tensor(float)" or min(shape, default=1) < 0 or np.prod([float(s) for s in shape]) > MOST:
            return None
        feed[entry.name] = draw.standard_normal(shape).astype(np.float32)
    return feed
