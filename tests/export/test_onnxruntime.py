"""The execution provider: ONNX Runtime's own answers, by our kernels, of an ordinary file; what it leaves, and why."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import twofour
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
    ours,
    product,
    require_same,
    scalar,
    session,
    sparse,
)

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("size", [(64, 72), (36, 130), (260, 33), (4, 1024)])
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
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.S)), {})
    providers, difference = capsys.readouterr().out.splitlines()
    assert NAME in providers and float(difference) < 1e-5


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


def test_heads_of_a_tensor_that_is_made_inside_leave_attention_whole() -> None:
    model = onnx.load_from_string(exported("places", free=False))
    weights = {one.name for one in model.graph.initializer}
    scores = next(n for n in model.graph.node if n.op_type == "MatMul" and not weights & set(n.input))
    queries = next(n for n in model.graph.node if n.op_type == "Reshape")
    queries.input[0] = scores.input[1]  # the query is of the keys
    file = model.SerializeToString()
    assert not any("Softmax" in part for part in require_same(file, feed_of(file, 2, 9, 9)))
