"""A model of low bits, compiled: the bits of its whole numbers, by kernels that its plan names, or why by none."""

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.of_bits import of_bits, run, whole
from twofour import quantization
from twofour.kernels.bits_matmul import bits_rows
from twofour.kernels.dense_matmul import PLAIN
from twofour.measure.cache import Cache

pytestmark = pytest.mark.usefixtures("codes_win")

WIDTHS = [("w1", "a1"), ("w1", "a2"), ("w2", "a2"), ("w1.58", "a8"), ("w4", "a8"), ("b3", "s4"), ("ternary5", "b2")]


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize(("weights", "inputs"), WIDTHS)
def test_kernels_give_the_bits_of_the_whole_numbers(weights: str, inputs: str, data: bool) -> None:
    model = of_bits(weights, inputs, data=data)
    fast = twofour.compile(model, torch.randn(3, 71), tokens=(3,), graph=False)
    plan: Any = fast.plan
    assert all(run(fast)) and not any(run(model))
    for layer in plan.layers[::2]:
        design = layer.kernel.split("_")[2]
        assert layer.kernel in {row.name for row in bits_rows()}
        name = quantization.of(model)["0"].widths.name
        assert layer.reason.startswith(f"{name} {design}: ") and PLAIN.name in layer.times[3]
        dense = [s for row, s in layer.times[3].items() if row.startswith("dense_matmul")]
        assert f"{min(dense) / layer.times[3][layer.kernel]:.2f}x the speed of the best dense float32" in layer.reason
    for shape in ((1, 71), (3, 71), (20, 71), (2, 5, 71), (71,), (0, 71)):
        x = 2 * torch.randn(shape)
        assert torch.equal(fast(x), whole(model, x))


@pytest.mark.parametrize("inputs", ["a8", "a4", None])
@pytest.mark.parametrize(
    ("weights", "group", "symmetric"), [("w4", 32, False), ("w1.58", 64, True), ("w3", None, False)]
)
def test_groups_zero_points_and_float_inputs_run_on_kernels(inputs, weights, group, symmetric, tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 70), nn.ReLU(), nn.Linear(70, 8)).eval()
    twofour.quantize(model, weights, inputs, group=group, symmetric=symmetric, ends=None, skip="2")
    x = torch.randn(3, 128)
    fast = twofour.compile(model, x, tokens=(3,), graph=False)
    assert run(fast) == [True] and "groups: " in fast.plan.layers[0].reason  # type: ignore[union-attr, index]
    twofour.save(fast, tmp_path / "m.safetensors")
    again = twofour.load(tmp_path / "m.safetensors", model)
    for tokens in (1, 3, 20):
        x = torch.randn(tokens, 128)
        want = whole(model[:1], x)  # type: ignore[index]
        for layer in (fast[0], again[0]):  # type: ignore[index]
            if inputs is None:
                torch.testing.assert_close(layer(x), want, atol=1e-5, rtol=1e-5)
            else:
                assert torch.equal(layer(x), want)


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("inputs", ["a2", "s4", "b2"])
def test_a_token_with_nan_is_nan_alone(inputs: str, data: bool) -> None:
    model = of_bits("w2", inputs, data=data)
    fast = twofour.compile(model, torch.randn(4, 71), tokens=(4,), graph=False)
    x = torch.randn(4, 71)
    x[1, 70], x[3, 2] = float("nan"), float("inf")
    y = fast(x)
    assert y[1].isnan().all() and y[::2].isfinite().all()
    assert torch.equal(y.nan_to_num(7.0), whole(model, x).nan_to_num(7.0))


def test_a_model_in_whole_numbers_is_the_same_model(tmp_path) -> None:
    model, other, x = of_bits("w4", "a8"), of_bits("w4", "a8"), torch.randn(3, 71)
    twofour.save(model, tmp_path / "m")
    with quantization.in_whole_numbers(other):
        assert quantization.of(other) == quantization.of(model)
        again = twofour.load(tmp_path / "m", other, tokens=(3,))
    assert torch.equal(again(x), model(x)) and all(run(again))


def test_bfloat16_models_answer_in_bfloat16() -> None:
    model = of_bits("w2", "a4", dtype=torch.bfloat16)
    x = torch.randn(3, 71).bfloat16()
    fast = twofour.compile(model, x, tokens=(3,), graph=False)
    assert all(run(fast)) and torch.equal(fast(x), whole(model, x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_models_of_other_dtypes_run_in_their_floats_and_the_plan_says_so(dtype: torch.dtype) -> None:
    model, x = of_bits("w4", "a8", dtype=dtype), torch.randn(3, 71).to(dtype)
    fast = twofour.compile(model, x, tokens=(3,), graph=False)
    plan: Any = fast.plan
    assert not any(run(fast)) and all(f"its weight is {dtype}" in layer.reason for layer in plan.layers)
    assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize(("weights", "sparse"), [("w4", True), ("w8", True), ("w2", False)])
def test_2x4_runs_on_kernels_that_skip_its_zeros_where_those_are_faster(weights, sparse, tmp_path, monkeypatch) -> None:
    """Told times: the same bits either way, and the plan says what the other would take."""
    stored = Cache.times

    def told(cache: Cache, key: str, names: Any, measure: Any) -> dict[str, float]:
        if not any("2x4" in name for name in names):
            return stored(cache, key, names, measure)
        return {name: 1e-6 if ("2x4" in name) is sparse else 2e-6 for name in names}

    monkeypatch.setattr(Cache, "times", told)
    model = twofour.prune(nn.Sequential(nn.Linear(80, 40), nn.ReLU(), nn.Linear(40, 16)).eval(), {"0": "2:4"})
    twofour.quantize(model, weights, "a8", ends=None)
    x = torch.randn(3, 80)
    fast: Any = twofour.compile(model, x, tokens=(3,), graph=False)
    first, second = fast.plan.layers
    assert first.sparse is sparse and not second.sparse
    assert ("2:4" in first.kernel.replace("2x4", "2:4")) is sparse and "2x4" not in second.kernel
    said = (
        ", 2.00x that of the best dense product of codes" if sparse else "; skipping the zeros of 2:4 takes 2.00x its"
    )
    assert said in first.reason and "2:4" not in second.reason
    twofour.save(fast, tmp_path / "m.safetensors")
    again: Any = twofour.load(tmp_path / "m.safetensors", model)
    small: Any = twofour.compile(model, x, tokens=(3,), graph=False, memory="small")
    for tokens in (1, 3, 20):
        x = torch.randn(tokens, 80)
        for one in (fast, again, small, pickle.loads(pickle.dumps(fast))):
            assert torch.equal(one(x), whole(model, x))


def test_zero_points_that_no_kernel_takes_run_in_floats_and_say_so() -> None:
    model, x = nn.Sequential(nn.Linear(71, 33)).eval(), torch.randn(2, 71)
    twofour.quantize(model, "w8", None, symmetric=False)
    plan: Any = twofour.compile(model, x, tokens=(2,), graph=False).plan
    assert "takes zero points of at most 7 bits" in plan.layers[0].reason and "in floats" in plan.layers[0].reason


@pytest.mark.parametrize("graph", [False, "auto"])
@pytest.mark.parametrize("data", [False, True])
def test_it_answers_as_the_model_does_and_the_plan_says_why(graph, data: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 5)
    ).eval()
    twofour.quantize(model, {"5": "float", "*": "w2"}, "a2", data=[x] if data else None)
    with quantization.in_whole_numbers(model):
        whole = model(x)
    fast = twofour.compile(model, x, tokens=(4,), graph=graph)
    torch.testing.assert_close(fast(x), whole, atol=1e-4, rtol=1e-4)
    reasons = {layer.name: layer.reason for layer in fast.plan.layers}  # type: ignore[union-attr]
    assert "w2a2" in reasons["0"] and reasons["3"].startswith("w2a2 ")
    assert not reasons["5"].startswith("dense: w2")
    assert "w2a2" in str(fast.plan) and set(quantization.of(model)) == {"0", "3"}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_file_carries_weights_and_steps(tmp_path, compiled: bool, sparse: bool) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
        model = twofour.prune(model, "2:4") if sparse else model
        return twofour.quantize(model, "w4", "a8", data=[torch.randn(8, 32)])

    model, x = made(0), torch.randn(3, 32)
    twofour.save(twofour.compile(model, x, tokens=(3,)) if compiled else model, tmp_path / "low.safetensors")
    again = twofour.load(tmp_path / "low.safetensors", made(1), tokens=(3,))
    assert torch.equal(again(x), whole(model, x)) and all(run(again))
    assert {held.widths.name for held in quantization.of(again).values()} == {"w4a8"}
