"""A model of low bits, compiled: the bits of its whole numbers, by kernels that its plan names, or why by none."""

import copy
import pickle
import re
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from twofour import native, quantization
from twofour.compiler import graph as compiled_graph
from twofour.compiler import low_bits
from twofour.compiler.choose import candidates
from twofour.compiler.codes import Codes, hold_codes, hold_floats
from twofour.compiler.computing import Computing
from twofour.compiler.graph_low_bits import widths_and_kernels
from twofour.compiler.low_bits import LinearOfCodes
from twofour.compiler.terms import Terms
from twofour.compiler.unpacked import Reads
from twofour.errors import KernelError, LayerError, QuantizationError
from twofour.kernels.bits_matmul import BitWeight, bits_rows, twos
from twofour.kernels.dense_matmul import PLAIN
from twofour.measure.cache import Cache

WIDTHS = [("w1", "a1"), ("w1", "a2"), ("w2", "a2"), ("w1.58", "a8"), ("w4", "a8"), ("b3", "s4"), ("ternary5", "b2")]


@pytest.fixture(autouse=True)
def _cache(times_cache, monkeypatch) -> None:
    """Let kernels beat floats, whatever a busy machine makes of layers this small."""
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    times = {"kernels": 1e-6, "floats": 2e-6}
    monkeypatch.setattr(low_bits, "race", lambda calls, **_: ({name: times[name] for name in calls}, 0.0))
    stored = Cache.times

    def of_calls(cache: Cache, key: str, names: Any, measure: Any) -> dict[str, float]:
        return measure()[0] if set(names) == set(times) else stored(cache, key, names, measure)

    monkeypatch.setattr(Cache, "times", of_calls)


def of_bits(weights: str, inputs: str, *, data: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(71, 33), nn.ReLU(), nn.Linear(33, 5, bias=False)).eval().to(dtype)
    given: Any = [torch.randn(40, 71).to(dtype)] if data else None
    return twofour.quantize(model, weights, inputs, data=given, ends=None)


def whole(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with quantization.in_whole_numbers(model):
        return model(x)


def run(model: nn.Module) -> list[bool]:
    return [held.runs is not None for held in quantization.of(model).values()]


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


@pytest.mark.parametrize("data", [False, True])
def test_graphs_and_exports_hold_the_products_of_codes(data: bool) -> None:
    model, x = of_bits("w2", "a3", data=data), torch.randn(6, 71)
    fast = twofour.compile(model, x, tokens=(6,), graph=True)
    torch.testing.assert_close(fast(x), whole(model, x))
    exported = torch.export.export(fast, (x,)) if data else None
    if exported is not None:
        assert "twofour.linear" in str(exported.graph)
        assert torch.equal(exported.module()(x), whole(model, x))


def test_a_whole_model_is_timed_anew_for_other_widths(monkeypatch) -> None:
    named, cases = Cache.key, []

    def key(cache: Cache, case: str, copies: int = 1) -> str:
        cases.append(case)
        return named(cache, case, copies)

    monkeypatch.setattr(Cache, "key", key)
    monkeypatch.setattr("twofour.compiler.graph._engines", lambda *_: ({"layers": 2.0, "graph": 1.0}, 0.0))
    for weights in ("w1", "w2"):
        twofour.compile(of_bits(weights, "a2"), torch.randn(3, 71), tokens=(3,), graph=True)
    assert len({case for case in cases if case.startswith("engines/")}) == 2


def test_what_the_time_of_a_graph_follows_from_tells_recipes_apart() -> None:
    def facts(weights: Any = "w4", inputs: str | None = "a8", **how: Any) -> str:
        model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4))
        options: dict[str, Any] = {"ends": None, **how}
        return repr(widths_and_kernels(twofour.quantize(model.eval(), weights, inputs, **options)))

    data = [torch.randn(4, 64)]
    found = [facts(), facts("w2"), facts({"0": "w2", "*": "w4"}), facts({"2": "w2", "*": "w4"}), facts("w4", "a4")]
    found += [facts(inputs=None), facts(data=data), facts({"0": "w4"}, group=32), facts(symmetric=False)]
    found += [facts(scales="tensor")]
    assert len(set(found)) == len(found)


def test_a_dtype_that_changes_no_quantised_layer_is_told_of(caplog, no_measuring) -> None:
    """It was passed over in silence."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(4, 64)
    both, one = "the 2 layers that were", "the one layer that was"
    for skip, which, rest in (
        ((), both, "no other layer takes it"),
        (("2",), one, "it is that of the one other layer"),
    ):
        low = quantization.quantize(copy.deepcopy(model), "w8", "a8", data=[x], skip=skip)
        plan: Any = twofour.compile(low, x, "int8", graph=False, progress=False).plan
        (said,) = (note for note in plan.notes if note.startswith('dtype="int8" does not change'))
        assert f"{which} quantised, to widths of their own (w8a8); {rest}" in said and said in caplog.text
    plan = twofour.compile(low, x, graph=False, progress=False).plan  # pyright: ignore[reportAttributeAccessIssue]
    assert not any("does not change" in note for note in plan.notes)
    assert "of the answer's norm" in str(plan)


def test_a_compiled_model_is_refused_as_that_where_it_is_to_be_pruned() -> None:
    fast = twofour.compile(of_bits("w2", "a2"), tokens=(3,), graph=False)
    assert "widths=w2a2" in str(fast)
    with pytest.raises(LayerError, match="a compiled model cannot be pruned"):
        twofour.prune(fast, "2:4")


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_a_graph_may_tip_codes_and_is_right_where_none_are(factor: float, monkeypatch, no_measuring) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model, x = nn.Sequential(*layers, nn.Linear(64, 64)).eval(), torch.randn(512, 64)
    written = compiled_graph.rewrite_graph

    def otherwise(fast: nn.Module, graph: Any, *rest: Any) -> Any:
        """Put noise in front of all but the first product, and a factor behind the last."""
        found, nodes = written(fast, graph, *rest), graph.module.graph
        products = [node for node in nodes.nodes if str(node.target).startswith("bits_linear")]
        for node in products[1:]:
            with nodes.inserting_before(node):
                node.args = (nodes.call_function(torch.ops.aten.add.Tensor, (node.args[0], 1e-6)),)
        with nodes.inserting_after(products[-1]):
            products[-1].replace_all_uses_with(last := nodes.call_function(torch.ops.aten.mul.Tensor))
        last.args = products[-1], factor
        return found

    monkeypatch.setattr(compiled_graph, "rewrite_graph", otherwise)
    fast: Any = twofour.compile(twofour.quantize(model, "w4", "a8", ends=None), x, tokens=(512,), graph=True)
    account = fast.plan.account
    if factor == 1:
        assert account.engine == "graph" and 1e-4 < fast.plan.error < 1e-2
        assert f"differs from the layers by {fast.plan.error:.1e} on the example, since codes" in account.reason
    else:
        assert account.engine == "layers" and fast.plan.error == 0
        assert re.search(r"the rewritten graph differs from the layers by (9\.9e-04|1\.0e-03) ", account.reason)


def test_a_graph_makes_its_sums_in_whole_numbers_where_these_are_asked_for(monkeypatch) -> None:
    monkeypatch.setattr("twofour.compiler.graph._engines", lambda *_: ({"layers": 2.0, "graph": 1.0}, 0.0))
    model, x = of_bits("w2", "a2", data=True), torch.randn(6, 71)
    fast: Any = twofour.compile(model, x, tokens=(6,), graph=True)
    assert fast.plan.account.engine == "graph"
    made: list[nn.Module] = []
    own = quantization.reference.integer_product
    monkeypatch.setattr(
        "twofour.quantization.layer.integer_product", lambda module, *given: made.append(module) or own(module, *given)
    )
    plain = fast(x)
    assert not made
    with quantization.in_whole_numbers(fast):
        assert torch.equal(fast(x), whole(model, x)) and made == [fast[0], fast[2], model[0], model[2]]  # type: ignore[index]
        again = copy.deepcopy(fast)  # is none of the reference
    made.clear()
    assert torch.equal(fast(x), plain) and torch.equal(again(x), plain) and not made


def test_a_model_in_whole_numbers_is_the_same_model(tmp_path) -> None:
    model, other, x = of_bits("w4", "a8"), of_bits("w4", "a8"), torch.randn(3, 71)
    twofour.save(model, tmp_path / "m")
    with quantization.in_whole_numbers(other):
        assert quantization.of(other) == quantization.of(model)
        again = twofour.load(tmp_path / "m", other, tokens=(3,))
    assert torch.equal(again(x), model(x)) and all(run(again))


def test_a_file_holds_the_graph_of_layers_that_no_kernel_takes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("twofour.compiler.graph._engines", lambda *_: ({"layers": 2.0, "graph": 1.0}, 0.0))
    model, x = nn.Sequential(nn.Linear(48, 16), nn.ReLU()).eval(), torch.randn(3, 48)
    twofour.quantize(model, "w4", "a8", group=16)
    fast = twofour.compile(model, x, tokens=(3,), graph=True)
    twofour.save(fast, tmp_path / "m")
    again: Any = twofour.load(tmp_path / "m", model)
    assert not any(run(again)) and again.plan.account.engine == "graph"
    torch.testing.assert_close(again(x), whole(model, x))


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


def test_codes_are_the_weight_and_what_stands_beside_them_is_followed() -> None:
    model, x = of_bits("w4", "a8", data=True), torch.randn(3, 71)
    fast: Any = twofour.compile(model, x, tokens=(3,), graph=False)
    assert {"0.weight", "0.weight_step"} <= set(model.state_dict())
    assert set(fast.state_dict()) == {
        "0.bias",
        *(f"{i}.{part}" for i in (0, 2) for part in ("input_step", "input_zero")),
    }
    for layer in fast.plan.layers[::2]:
        assert layer.bytes_after == fast[int(layer.name)].__dict__["_twofour_attached"].runs.product.prepared.nbytes
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert all(run(again)) and torch.equal(again(x), whole(model, x))
    whole_weight, scales = quantization.of(model)["0"].whole_weight(model[0])  # type: ignore[index]
    assert torch.equal(fast[0].weight.clone(), whole_weight * scales.detach()[:, None])
    with torch.no_grad():
        for one in (model, fast):
            one[0].bias.mul_(-2)
            one[0].input_step.mul_(1.5)
    assert torch.equal(fast(x), whole(model, x)) and torch.equal(fast(x.double()), model(x.double()))
    given = x.clone().requires_grad_()
    fast(given).sum().backward()
    assert given.grad is not None and given.grad.abs().sum() > 0
    with quantization.in_whole_numbers(fast):
        assert torch.equal(fast(x), whole(model, x))
    with pytest.raises(KernelError, match="cannot be changed"):
        fast[0].weight.mul_(2)
    with pytest.raises(QuantizationError, match="codes in the place"):
        quantization.remove(fast)
    hold_floats(fast[0])
    assert torch.equal(fast(x), whole(model, x)) and type(fast[0]) is type(model[0])  # type: ignore[index]


def test_no_float_weight_stays_in_memory_behind_the_codes() -> None:
    model, x = of_bits("w4", "a8", data=True), torch.randn(3, 71)
    fast: Any = twofour.compile(model, x, tokens=(3,), graph=False)
    copied = copy.deepcopy(model)
    copied(x)  # looks at its steps, and notes of which tensors
    kept = weakref.ref(copied[0].weight)  # type: ignore[index]
    codes = LinearOfCodes.of("0", copied[0], fast[0].__dict__["_twofour_attached"].runs.product.dispatch)  # type: ignore[index]
    hold_codes("0", copied[0], Codes.of(copied[0], lambda: codes), Reads())  # type: ignore[index]
    assert kept() is None and torch.equal(copied(x), fast(x))


def test_a_weight_that_another_layer_has_too_stays_and_is_followed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(64, 48), nn.Linear(48, 64, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    model, x = twofour.quantize(Tied().eval(), "w4", "a8", ends=None), torch.tensor([1, 5, 7])
    fast: Any = twofour.compile(model, x, tokens=(3,), graph=False)
    assert fast.head.weight is fast.embed.weight and "another layer has" in fast.plan.layers[-1].reason
    assert torch.equal(fast(x), whole(model, x))
    with torch.no_grad():
        for one in (model, fast):
            one.embed.weight.mul_(-2)  # type: ignore[union-attr, operator]
            one.head.weight_step.mul_(1.5)  # type: ignore[union-attr, operator]
    assert torch.equal(fast(x), whole(model, x))


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_steps_that_scale_nothing_are_refused_by_name(bad: float) -> None:
    model = of_bits("w2", "a2", data=True)
    model[2].weight_step.data[1] = bad  # type: ignore[union-attr, index]
    with pytest.raises(QuantizationError, match="layer `2`: a step"):
        twofour.compile(model, torch.randn(2, 71), tokens=(2,))


@pytest.mark.parametrize(("part", "bad"), [("input_step", 0.0), ("input_step", float("nan")), ("input_zero", 1.6)])
def test_steps_that_become_nothing_after_compiling_are_refused_by_name(part: str, bad: float) -> None:
    model, x = of_bits("w2", "a2", data=True), torch.randn(2, 71)
    for graph in (False, True):
        fast: Any = twofour.compile(model, x, tokens=(2,), graph=graph)
        with torch.no_grad():
            getattr(fast[2], part).fill_(bad)
        with pytest.raises(QuantizationError, match=f"layer `2`: a step of the layer is no scale: `{part}`"):
            fast(x)


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


def test_the_plan_says_what_kernels_of_codes_do_not_do(monkeypatch) -> None:
    """Zeros of blocks, and of groups, are multiplied, and on a GPU there is no such kernel."""
    recipe = {"0": "block:4x4@0.5", "2": "2:4"}
    model = twofour.prune(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).eval(), recipe)
    x = torch.randn(3, 64)
    plan: Any = twofour.compile(
        twofour.quantize(model, "w2", "a2", ends=None, group=32), x, tokens=(3,), graph=False
    ).plan
    for layer, pattern in zip(plan.layers, ("block:4x4@0.5", "2:4"), strict=True):
        assert layer.reason.endswith(f"; no kernel of codes skips its zeros of {pattern}"), plan
    on_gpu = low_bits.run_low_bits(model, plan, {}, Terms(Computing(device="cuda"), "fast", (3,)))
    said = "dense: w2a2: no kernel of codes on a GPU; it computes in floats"
    assert all(layer.reason.startswith(said) for layer in on_gpu.layers) and not any(run(model))


def test_a_kernel_that_refuses_while_it_is_measured_is_an_error_not_a_layer_in_floats(monkeypatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise KernelError("on purpose")

    monkeypatch.setattr(Terms, "choose", refuse)
    with pytest.raises(KernelError, match="on purpose"):
        twofour.compile(of_bits("w2", "a2"), torch.randn(3, 71), tokens=(3,), graph=False)
    weight = BitWeight(torch.zeros(4, 70_000, dtype=torch.uint8), twos(8), torch.ones(4))
    with pytest.raises(KernelError, match="by 8 bits here: it has sums of 70000 inputs, which may exceed int32"):
        candidates(weight)


@pytest.mark.parametrize("isa", ["avx2", "avx_vnni", "avx512_vnni"])
def test_without_all_of_avx512_the_rows_of_the_highest_level_of_each_layout_are_measured(isa: str, monkeypatch) -> None:
    if isa not in native.instruction_sets() or native.unavailable(isa):
        pytest.skip(f"needs {isa}")
    monkeypatch.setenv("TWOFOUR_ISA", isa)
    weight = BitWeight(torch.zeros(4, 64, dtype=torch.uint8), twos(4), torch.ones(4))
    found = {kernel.name for kernel in candidates(weight)}
    assert found == {
        f"bits_matmul_{name}" for name in (f"bytes__{isa}", f"packed__{isa}", "planes__avx2", "fours__avx2")
    }


@pytest.mark.parametrize(("at_one", "kept"), [(4.0, True), (1.1, False)])
def test_without_an_example_few_tokens_count_as_much_as_many(at_one: float, kept: bool, monkeypatch) -> None:
    """Kernels that are 4 times as fast for one token stay where floats are twice as fast for many."""
    counts: list[int] = []

    def raced(calls: Any, **_: Any) -> tuple[dict[str, float], float]:
        tokens = len(calls["floats"].args[0])
        counts.append(tokens)
        return {"kernels": 1.0, "floats": at_one if tokens == 1 else 0.5}, 0.0

    monkeypatch.setattr(low_bits, "race", raced)
    fast = twofour.compile(of_bits("w2", "a2"), tokens=(1, 3, 6))
    assert run(fast) == [kept, kept] and counts == [1, 6, 1, 6]


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
