"""ONNX graphs with 2:4 weights, sessions of ONNX Runtime with our provider, and what both must agree in."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import twofour
from twofour.export.onnxruntime import NAME, add_provider

RANDOM = np.random.default_rng(0)


def sparse(inputs: int, outputs: int) -> np.ndarray:
    """A weight (inputs, outputs), 2:4 along its inputs."""
    weight = RANDOM.standard_normal((outputs, inputs // 4, 4)).astype(np.float32)
    order = np.argsort(RANDOM.random(weight.shape), axis=-1)
    weight[order < 2] = 0
    return np.ascontiguousarray(weight.reshape(outputs, inputs).T)


def numbers(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def graph(
    nodes: Sequence[Any],
    inputs: dict[str, Sequence[int | str | None]],
    outputs: Sequence[str],
    constants: dict[str, np.ndarray],
    opset: int = 17,
    lists: Sequence[str] = (),
) -> bytes:
    """A file whose inputs are float32 of these shapes, and `lists` of whole numbers."""
    made = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
        + [helper.make_tensor_value_info(name, TensorProto.INT64, [None]) for name in lists],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return model.SerializeToString()


def session(file: bytes, threads: int = 1, optimised: bool = True) -> Any:
    """A session with the provider; `ours` of it says what it runs."""
    options = ort.SessionOptions()
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return ort.InferenceSession(file, add_provider(options, threads=threads))


def ours(made: Any) -> list[list[str]]:
    """The operators of each part that the provider runs, sorted."""
    parts = [part for part in made.get_provider_graph_assignment_info() if part.ep_name == NAME]
    return sorted(sorted(node.op_type for node in part.get_nodes()) for part in parts)


def require_same(
    file: bytes, *feeds: dict[str, np.ndarray], threads: int = 1, optimised: bool = True
) -> list[list[str]]:
    """Hold the answers against ONNX Runtime's CPU provider; return what ran here."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    own = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    made = session(file, threads, optimised)
    for feed in feeds:
        for wanted, got in zip(own.run(None, feed), made.run(None, feed), strict=True):
            assert got.shape == wanted.shape and got.dtype == wanted.dtype
            largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=1)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * largest)
    return ours(made)


def product(
    *after: Any, inputs: int = 64, outputs: int = 72, opset: int = 17, out: str = "y", **constants: np.ndarray
) -> bytes:
    """x (any, any, inputs) by a sparse weight -> `mm`, and nodes behind it."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["mm" if after else out]), *after]
    return graph(nodes, {"x": [None, None, inputs]}, [out], {"w": sparse(inputs, outputs), **constants}, opset)


def node(kind: str, inputs: str, output: str, **settings: Any) -> Any:
    return helper.make_node(kind, inputs.split(), [output], **settings)


def scalar(number: float) -> np.ndarray:
    return np.array(number, np.float32)


ROOT2, HALF = 1.4142135381698608, 0.5


ACTIVATIONS = {
    "relu": ([node("Relu", "b", "y")], {}),
    "gelu": ([node("Gelu", "b", "y")], {}),
    "gelu tanh": ([node("Gelu", "b", "y", approximate="tanh")], {}),
    "silu": ([node("Sigmoid", "b", "s"), node("Mul", "b s", "y")], {}),
    "erf, v first": (
        [
            node("Div", "b r", "d"),
            node("Erf", "d", "e"),
            node("Add", "e one", "a"),
            node("Mul", "b a", "m"),
            node("Mul", "m half", "y"),
        ],
        {"r": scalar(ROOT2), "one": scalar(1), "half": scalar(HALF)},
    ),
    "erf, half inside": (
        [
            node("Mul", "b r", "d"),
            node("Erf", "d", "e"),
            node("Add", "one e", "a"),
            node("Mul", "half a", "m"),
            node("Mul", "m b", "y"),
        ],
        {"r": scalar(1 / ROOT2), "one": scalar(1), "half": scalar(HALF)},
    ),
    "erf, half of v": (
        [
            node("Div", "b r", "d"),
            node("Erf", "d", "e"),
            node("Add", "e one", "a"),
            node("Mul", "b half", "m"),
            node("Mul", "m a", "y"),
        ],
        {"r": scalar(ROOT2), "one": scalar(1), "half": scalar(HALF)},
    ),
}


def normed(*after: Any, outputs: Sequence[str] = ("y",)) -> bytes:
    """Product, bias, residual `r`, norm."""
    nodes = [
        *(node("MatMul", "x w", "mm"), node("Add", "mm bias", "b"), node("Add", "r b", "sum")),
        *(node("LayerNormalization", "sum scale shift", "y", axis=-1, epsilon=1e-5), *after),
    ]
    constants = {"w": sparse(64, 72), "bias": numbers(72), "scale": numbers(72), "shift": numbers(72)}
    return graph(nodes, {"x": [None, None, 64], "r": [None, None, "c"]}, outputs, constants)


class Layer(nn.Module):
    """An encoder's layer with a mask, its attention written as `form`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.register_buffer("places", torch.randn(1, 4, 9, 9))

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor) -> Tensor:
        """Return (B, T, 64) of x (B, T, 64), a mask (B, 1, 1, S) and, for attention to others, memory (B, S, 64)."""
        other = memory if self.form == "cross" else x
        q, k, v = (
            layer(source).view(source.shape[0], -1, 4, 16).transpose(1, 2)
            for layer, source in ((self.q, x), (self.k, other), (self.v, other))
        )
        if self.form == "sdpa":
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(-1, -1, x.shape[1], -1))
        else:
            scores = q @ k.transpose(-1, -2) / 4.0
            scores = scores + self.places[:, :, : x.shape[1]] if self.form == "places" else scores
            mixed = torch.softmax(scores + mask if self.form != "no mask" else scores, -1) @ v
        y = self.norm(x + self.out(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], 64)))
        return y + self.down(nn.functional.gelu(self.up(y)))


@cache
def exported(form: str, free: bool = True) -> bytes:
    torch.manual_seed(1)
    model = twofour.prune(Layer(form).eval(), "2:4")
    example = torch.randn(2, 9, 64), torch.zeros(2, 1, 1, 9), torch.randn(2, 9, 64)
    names = ["x", "mask", "memory"]
    axes = {"x": {0: "n", 1: "t"}, "mask": {0: "n", 3: "s"}, "memory": {0: "n", 1: "s"}} if free else None
    file = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        torch.onnx.export(model, example, file, dynamo=False, opset_version=17, input_names=names, dynamic_axes=axes)
    return file.getvalue()


def feed_of(file: bytes, batch: int, rows: int, keys: int, hidden: float = -np.inf) -> dict[str, np.ndarray]:
    mask = np.zeros((batch, 1, 1, keys), np.float32)
    mask[..., keys // 2 :] = hidden
    given = {"x": numbers(batch, rows, 64), "mask": mask, "memory": numbers(batch, keys, 64)}
    wanted = {entry.name for entry in onnx.load_from_string(file).graph.input}
    return {name: value for name, value in given.items() if name in wanted}
