"""The execution provider on attention and whole layers: what one part holds, and odd graphs that stay whole."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import twofour
from twofour.export.onnxruntime import add_provider

onnx = pytest.importorskip("onnx", reason="the extra [onnx] is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra [onnx] is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

from onnx import TensorProto  # noqa: E402

from tests.export.onnx_graphs import (  # noqa: E402
    ACTIVATIONS,
    exported,
    feed_of,
    graph,
    node,
    numbers,
    ours,
    product,
    require_same,
    scalar,
    session,
    sparse,
)


@pytest.mark.parametrize("form", ["written out", "no mask", "sdpa"])
def test_an_encoder_layer_is_three_parts(form: str) -> None:
    file = exported(form)
    feeds = [
        feed_of(file, 2, 9, 9),
        feed_of(file, 1, 1, 1, 0),
        feed_of(file, 3, 33, 33, -3e38),
        feed_of(file, 1, 130, 130),
    ]
    parts = require_same(file, *feeds, threads=2)
    attention = [part for part in parts if "Softmax" in part]
    assert len(parts) == 3 and len(attention) == 1 and attention[0].count("MatMul") == 5
    assert sum("LayerNormalization" in part for part in parts) == 1


@pytest.mark.parametrize("form", ["written out", "sdpa", "places"])
def test_fixed_sizes_which_onnx_runtime_writes_as_gemm_between_reshapes(form: str) -> None:
    parts = require_same(exported(form, free=False), feed_of(exported(form, free=False), 2, 9, 9))
    assert len(parts) == 3 and any("Gemm" in part for part in parts)
    assert sum(part.count("MatMul") + part.count("Gemm") for part in parts) == 8


def encoder(name: str, attention: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small encoder of transformers with random weights, and its inputs."""
    transformers = pytest.importorskip("transformers", reason="the extra [text] is not installed")
    common = {"attn_implementation": attention} if name != "MPNet" else {}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    if name == "DistilBert":
        sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}
    inputs = {"input_ids": torch.randint(5, 99, (2, 16)), "attention_mask": torch.ones(2, 16, dtype=torch.int64)}
    if name == "ViT":
        sizes, inputs = {**sizes, "image_size": 32, "patch_size": 8}, {"pixel_values": torch.randn(2, 3, 32, 32)}
    else:
        sizes |= {"vocab_size": 100, "max_position_embeddings": 64}
    torch.manual_seed(2)
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes, **common)), inputs


class FirstOutput(nn.Module):
    """A model of transformers that takes its inputs in their order and returns the first of its outputs."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the hidden states."""
        return self.model(**dict(zip(self.names, inputs, strict=True)))[0]


@pytest.mark.long
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Bert", "Roberta", "DistilBert", "MPNet", "ViT"])
def test_layers_of_transformers_are_three_parts(name: str, attention: str, dynamo: bool, tmp_path: Path) -> None:
    model, inputs = encoder(name, attention)
    twofour.prune(model.eval(), "2:4")
    axes = {key: {0: "n", **({1: "t"} if value.ndim == 2 else {})} for key, value in inputs.items()}
    options = (
        {"dynamo": True, "external_data": False}
        if dynamo
        else {"dynamo": False, "opset_version": 17, "dynamic_axes": axes}
    )
    with warnings.catch_warnings(), torch.no_grad():
        torch.onnx.export(
            FirstOutput(model, list(inputs)).eval(),
            tuple(inputs.values()),
            tmp_path / "model.onnx",
            input_names=list(inputs),
            verbose=False,
            **options,
        )
    if "attention_mask" in inputs:
        inputs["attention_mask"][1, 10:] = 0
    file = (tmp_path / "model.onnx").read_bytes()
    parts = require_same(file, {key: value.numpy() for key, value in inputs.items()})
    assert len(parts) == 6 and sum("Softmax" in part for part in parts) == 2
    assert all(part.count("MatMul") + part.count("Gemm") == 5 for part in parts if "Softmax" in part)


def test_a_graph_that_is_not_optimised_and_a_mask_of_one_number() -> None:
    file = exported("sdpa")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    made = ort.InferenceSession(file, add_provider(options))
    own = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    for keys in (9, 1):
        feed = feed_of(file, 2, 9, 9)
        feed["mask"] = feed["mask"][..., :keys]
        np.testing.assert_allclose(made.run(None, feed)[0], own.run(None, feed)[0], atol=1e-5)


def attention(
    q: Sequence[Any], k: Sequence[Any], v: Sequence[Any], *more: Any, heads: Sequence[Sequence[int]] = (), **given: Any
) -> bytes:
    """A file of attention in four heads of 16: nodes that make `q`, `k`, `v` and their shapes, and `more`."""
    shapes = dict(zip(("qs", "ks", "vs"), heads or [(0, -1, 4, 16)] * 3, strict=True))
    constants = {name: np.array(shape) for name, shape in shapes.items()}
    constants |= {"whole": np.array([0, -1, 64]), "quarter": scalar(0.25), **given.pop("constants")}
    made = {name for one in (*q, *k, *v, *more) for name in one.output} | set(given.get("lists", ()))
    constants = {name: value for name, value in constants.items() if name not in made}
    nodes = [
        *(*q, *k, *v, node("Reshape", "q qs", "q4"), node("Reshape", "k ks", "k4"), node("Reshape", "v vs", "v4")),
        node("Transpose", "q4", "qt", perm=[0, 2, 1, 3]),
        node("Transpose", "k4", "kt", perm=[0, 2, 3, 1]),
        node("Transpose", "v4", "vt", perm=[0, 2, 1, 3]),
        *(
            node("MatMul", "qt kt", "s"),
            node("Mul", f"s {given.pop('scale', 'quarter')}", "scaled"),
            node("Softmax", "scaled", "p"),
        ),
        *(node("MatMul", "p vt", "m"), node("Transpose", "m", "mt", perm=[0, 2, 1, 3])),
        *(*more, node("Reshape", "mt whole", "y")),
    ]
    return graph(nodes, given.pop("inputs"), given.pop("outputs", ["y"]), constants, **given)


WEIGHTS = {"wq": sparse(64, 64), "wk": sparse(64, 64), "wv": sparse(64, 64)}
PRODUCTS = [[node("MatMul", f"x w{name}", name)] for name in "qkv"]


@pytest.mark.parametrize("widths", [(64, 128, 128), (128, 64, 64)])
def test_attention_by_weights_of_other_inputs_keeps_its_products_outside(widths: tuple[int, int, int]) -> None:
    of = dict(zip("qkv", widths, strict=True))
    weights = {f"w{name}": sparse(width, 64) for name, width in of.items()}
    rows = {f"r{name}": np.array([-1, width]) for name, width in of.items()}
    rows["rv"][0] = 16 * 128 // of["v"]  # ONNX Runtime makes one of two equal Reshape
    made = [[node("Reshape", f"x r{name}", f"x{name}"), node("Gemm", f"x{name} w{name}", name)] for name in "qkv"]
    file = attention(*made, inputs={"x": [None, None, 128]}, heads=[(2, -1, 4, 16)] * 3, constants={**rows, **weights})
    parts = require_same(file, {"x": numbers(2, 8, 128)})
    (part,) = (part for part in parts if "Softmax" in part)
    assert part.count("MatMul") == 2 and "Gemm" not in part and len(parts) == 4


def test_shapes_whose_count_wraps_are_errors_of_a_run() -> None:
    file = attention(*PRODUCTS, inputs={"x": [None, None, 64]}, lists=["qs", "ks", "vs", "whole"], constants=WEIGHTS)
    made = session(file)
    assert [kind for kind in ours(made)[0] if kind == "MatMul"] == ["MatMul"] * 5
    right, wrapping = (1, 9, 4, 16), (1, 2**58 + 9, 4, 16)  # that is of 2^64 + 576 numbers
    assert made.run(None, feed_of_shapes(right, right, (1, 9, 64)))[0].shape == (1, 9, 64)
    for q, kv in ((right, wrapping), (wrapping, wrapping), (right, (1, -2, -9, 32)), ((1, -1, -1, 16), right)):
        with pytest.raises(Exception, match="twofour: no tensor can have shape"):
            made.run(None, feed_of_shapes(q, kv, (1, 9, 64)))


def feed_of_shapes(q: Sequence[int], kv: Sequence[int], whole: Sequence[int]) -> dict[str, np.ndarray]:
    shapes = {"qs": q, "ks": kv, "vs": kv, "whole": whole}
    return {"x": numbers(1, 9, 64), **{name: np.array(shape) for name, shape in shapes.items()}}


def test_values_that_nothing_reads_are_left() -> None:
    feed = {"x": numbers(2, 9, 64)}
    alive = node("Relu", "x", "alive")
    file = graph([node("MatMul", "x w", "y"), alive], {"x": [None, None, 64]}, ["alive"], {"w": sparse(64, 64)})
    assert require_same(file, feed, optimised=False) == []
    norm = node("LayerNormalization", "y scale", "n")
    constants = {"w": sparse(64, 64), "scale": numbers(64)}
    file = graph([node("MatMul", "x w", "y"), norm], {"x": [None, None, 64]}, ["y"], constants)
    assert require_same(file, feed, optimised=False) == [["MatMul"]]
    file = attention(*PRODUCTS, alive, inputs={"x": [None, None, 64]}, outputs=["alive"], constants=WEIGHTS)
    assert require_same(file, feed, optimised=False) == [["MatMul"]] * 3


def test_constants_that_the_runtime_drops_are_no_operands() -> None:
    constants = {**WEIGHTS, "q": numbers(2, 5, 64)}
    file = attention([], *PRODUCTS[1:], inputs={"x": [None, None, 64]}, constants=constants)
    assert require_same(file, {"x": numbers(2, 9, 64)}, optimised=False) == [["MatMul"]] * 2
    nodes = [node("MatMul", "x w", "m"), node("Add", "m none", "y")]
    file = graph(nodes, {"x": [None, 64]}, ["y"], {"w": sparse(64, 64), "none": numbers(0, 64)})
    assert require_same(file, {"x": numbers(1, 64)}, optimised=False) == [["MatMul"]]
    file = graph(
        [node("MatMul", "none w", "y")], {"x": [None, 64]}, ["y"], {"w": sparse(64, 64), "none": numbers(0, 64)}
    )
    assert require_same(file, {"x": numbers(1, 64)}, optimised=False) == []


def test_formulas_and_shapes_that_double_with_every_node_end() -> None:
    doubled = [node("Mul", f"f{i} f{i}", f"f{i + 1}") for i in range(40)]
    constants = {**WEIGHTS, "f0": scalar(1)}
    feed = {"x": numbers(2, 9, 64)}
    scaled = [*PRODUCTS[0], *doubled]
    file = attention(scaled, *PRODUCTS[1:], inputs={"x": [None, None, 64]}, constants=constants, scale="f40")
    assert require_same(file, feed, optimised=False) == [["MatMul"]] * 3
    empties = [node("Concat", f"e{i} e{i}", f"e{i + 1}", axis=0) for i in range(40)]
    shape = [node("Shape", "mt", "all"), node("Slice", "all none none", "e0"), *empties]
    shape.append(node("Concat", "batch e40 rest", "whole", axis=0))
    constants = {**WEIGHTS, "none": np.array([0]), "batch": np.array([2]), "rest": np.array([-1, 64])}
    file = attention(*PRODUCTS, *shape, inputs={"x": [None, None, 64]}, constants=constants)
    require_same(file, feed, optimised=False)


def test_sizes_are_followed_only_where_they_stay_what_they_are() -> None:
    feed = {"x": numbers(2, 9, 64)}
    batch = [node("Shape", "mt", "all"), node("Slice", "all zero one", "batch")]
    constants = {**WEIGHTS, "zero": np.array([0]), "one": np.array([1]), "rest": np.array([-1, 64])}
    inputs = {"x": [None, None, 64]}
    cast = [node("Cast", "batch", "c", to=TensorProto.BOOL), node("Cast", "c", "d", to=TensorProto.INT64)]
    whole = node("Concat", "d rest", "whole", axis=0)
    assert (
        require_same(attention(*PRODUCTS, *batch, *cast, whole, inputs=inputs, constants=constants), feed)
        == [["MatMul"]] * 3
    )
    picked = [node("Concat", "two batch", "c", axis=0), node("Gather", "c one", "d")]
    file = attention(*PRODUCTS, *batch, *picked, whole, inputs=inputs, lists=["two"], constants=constants)
    assert require_same(file, {**feed, "two": np.array([7, 1])}) == [["MatMul"]] * 3
    whole = node("Concat", "batch two", "whole", axis=0)
    made = session(attention(*PRODUCTS, *batch, whole, inputs=inputs, lists=["two"], constants=constants))
    with pytest.raises(Exception, match="wanted one"):
        made.run(None, {**feed, "two": np.array([9, 64])})
    nodes, constants = ACTIVATIONS["erf, v first"]
    constants = {**constants, "half": scalar(0.5).reshape(1, 1, 1, 1, 1), "bias": numbers(72)}
    require_same(product(node("Add", "bias mm", "b"), *nodes, opset=20, **constants), feed, optimised=False)


def test_attention_to_another_sequence_takes_its_operands_from_products_beside_it() -> None:
    file = exported("cross")
    parts = require_same(file, feed_of(file, 2, 9, 5), feed_of(file, 1, 40, 7))
    (attention,) = (part for part in parts if "Softmax" in part)
    assert attention.count("MatMul") == 2 and len(parts) == 6


def test_a_query_whose_keys_are_all_hidden_answers_as_onnx_runtime() -> None:
    file = exported("written out")
    feed = feed_of(file, 2, 9, 9)
    feed["mask"][1] = -np.inf
    own = ort.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, feed)[0]
    got = session(file).run(None, feed)[0]
    assert np.isnan(own[1]).all() and np.isnan(got[1]).all()
    np.testing.assert_allclose(got[0], own[0], atol=1e-5)


def test_heads_of_a_tensor_that_is_made_inside_leave_attention_whole() -> None:
    model = onnx.load_from_string(exported("places", free=False))
    weights = {one.name for one in model.graph.initializer}
    scores = next(n for n in model.graph.node if n.op_type == "MatMul" and not weights & set(n.input))
    queries = next(n for n in model.graph.node if n.op_type == "Reshape")
    queries.input[0] = scores.input[1]  # the query is of the keys
    file = model.SerializeToString()
    assert not any("Softmax" in part for part in require_same(file, feed_of(file, 2, 9, 9)))
