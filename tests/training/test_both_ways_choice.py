"""What runs 2:4 in training both ways: products that are measured, types that are met later, and what the plan says."""

import contextlib
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.training.both_ways import (
    TOKENS,
    assert_near,
    attach,
    batch,
    gradients,
    network,
    steps,
)
from twofour import masks, prune
from twofour.errors import TrainingError
from twofour.layers import CARRIED
from twofour.progress import Progress
from twofour.training import both_ways
from twofour.training.both_ways import Choice, LayerPlan, choose, saving
from twofour.training.sparse_linear import chooser, implementations
from twofour.training.sparse_linear.implementations import weight_kernels


def test_a_training_in_another_type_than_the_examples_is_chosen_anew(
    gaining: set[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    gaining |= {(64, 32), (32, 64), (48, 64), (64, 48)}
    model, plain = network(), network()
    handle = attach(model, kernels="measured")
    masked = {name: keep.clone() for name, keep in handle.masks().items()}
    for name, keep in masked.items():
        plain.get_parameter(name).data.mul_(keep)
    first = str(handle.plan)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = gradients(model, batch()), gradients(plain, batch())
    assert_near({"y": got["y"], "x": got["x"]}, {"y": want["y"], "x": want["x"]}, 2e-2)
    assert {layer.dtype for layer in handle.plan.layers} == {"bfloat16"}
    chosen = {choice.kernel for layer in handle.plan.layers for choice in layer.choices.values() if choice.sparse}
    assert chosen and all("bf16" in kernel for kernel in chosen)
    assert "note     chosen anew, after float32" in str(handle.plan)
    said = [record for record in caplog.records if "the training computes in bfloat16" in record.getMessage()]
    assert len(said) == 1 and said[0].levelname == "WARNING", "once, not for each layer"
    resumed = attach(network(), kernels="measured")  # in float32, as before
    resumed.load_state_dict(handle.state_dict())
    assert [layer.choices for layer in resumed.plan.layers] == [layer.choices for layer in handle.plan.layers]
    assert {layer.dtype for layer in resumed.plan.layers} == {"bfloat16"}
    gradients(model, batch())  # back in the example's type: what was measured then
    assert [line for line in str(handle.plan).splitlines() if "note" not in line] == first.splitlines()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(batch())
    assert "evaluation" not in str(handle.plan), "both types are known now"
    gradients(model, batch())
    with torch.no_grad():  # layouts of both types follow the weight
        model[0].weight.mul_(2)
    plain[0].weight.data.mul_(2)
    assert_near({"y": model(batch())}, {"y": plain(batch())}, 2e-6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_near({"y": model(batch())}, {"y": plain(batch())}, 2e-2)
    assert not any(record.levelname == "ERROR" for record in caplog.records)


@pytest.mark.parametrize("before", [False, True])
def test_masks_stay_where_another_type_gains_otherwise_and_it_is_said(
    gaining: set[tuple[int, int]], caplog: pytest.LogCaptureFixture, before: bool
) -> None:
    sizes = {(64, 32), (32, 64), (48, 64), (64, 48)}
    gaining |= sizes if before else set()
    handle = attach(model := network(), kernels="measured")
    gaining ^= sizes
    with torch.autocast("cpu", torch.bfloat16):
        model(batch()).float().square().sum().backward()
    assert bool(handle.masks()) is before and "layers keep the masks that they have" in caplog.text
    said = "no product gains: the mask stays" if before else "mask     none: its products gained less than 5 %"
    assert str(handle.plan).count(said) == 2 and {layer.unmasked for layer in handle.plan.layers} == {not before}


def test_a_layer_that_computes_in_two_types_in_every_step_lays_out_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(weight_kernels(torch.float32, TOKENS, torch.device("cpu"))[0])
    laid: list[str] = []
    blank = kind.blank
    monkeypatch.setattr(kind, "blank", lambda kernel, keep: laid.append(kernel.dtype) or blank(kernel, keep))
    model, plain = network(), network()
    handle = attach(model)
    for name, keep in handle.masks().items():
        plain.get_parameter(name).data.mul_(keep)
    for step in range(4):
        laid.clear()
        for net in (model, plain):
            net.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                net(batch()).float().square().sum().backward()
            net(batch()).square().sum().backward()
        assert not laid or step < 2, "the first step drops what was laid out before the second type was met"
        assert_near(*({name: w.grad for name, w in net.named_parameters()} for net in (model, plain)), 2e-2)
        with torch.no_grad():
            for net in (model, plain):
                for weight in net.parameters():
                    weight.mul_(1.1)
    gradients(model, batch())
    assert_near({"y": model(batch())}, {"y": plain(batch())}, 2e-6)


def test_evaluation_in_another_type_measures_nothing_and_the_plan_says_so() -> None:
    model = network()
    handle = attach(model)
    with torch.no_grad():
        for _ in range(2):
            model.double()(batch().double())
    assert str(handle.plan).count("float64 without gradients, as in evaluation, or compiled: dense") == 2


@pytest.mark.parametrize("schedule", ["fixed", "every=2"])
def test_a_layer_that_gains_nothing_stays_dense_unless_it_came_pruned(
    gaining: set[tuple[int, int]], schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    gaining.add((64, 32))  # the first layer's forward product
    model, dense = network(), network()
    handle = attach(model, kernels="measured", schedule=schedule)
    assert [layer.unmasked for layer in handle.plan.layers] == [False, True]
    said = "1 layers have no mask: the products of each gained less than 5 % from 2:4 when they were attached"
    assert said in handle.plan.summary
    assert "mask     none: its products gained less than 5 % from 2:4 when it was attached" in str(handle.plan)
    steps(model, torch.optim.SGD(model.parameters(), 0.1), 0, 3)
    assert list(handle.masks()) == ["0.weight"] and torch.count_nonzero(model[2].weight == 0) == 0
    handle.finish()
    assert list(masks.of(model)) == ["0.weight"] and type(model[2]) is nn.Linear
    gaining.clear()
    nothing = attach(dense, kernels="measured", schedule=schedule)
    assert not nothing.masks() and "all stay dense, without masks" in caplog.text
    assert_near(gradients(dense, batch()), gradients(network(), batch()), 2e-6)
    assert nothing.finish() is dense and not masks.of(dense)
    if schedule == "fixed":
        pruned = attach(prune(network(), {"2": "2:4-transposable"}), kernels="measured")
        assert list(pruned.masks()) == ["2.weight"] and pruned.plan.layers[0].unmasked
    assert attach(network(), kernels="measured", state="packed").masks().keys() == {"0.weight", "2.weight"}


def test_processes_that_measure_each_by_itself_have_the_same_masks(gaining: set[tuple[int, int]]) -> None:
    assert not gaining
    early = {name: network(seed=seed) for seed, name in enumerate(("measured", "pruned", "loaded", "asked for"))}
    early["pruned"] = prune(early["pruned"], {"0": "2:4-transposable", "2": "2:4-transposable"})
    handles = {
        name: attach(net, kernels="sparse" if name == "asked for" else "measured") for name, net in early.items()
    }
    handles["loaded"].load_state_dict(attach(network(), kernels="measured").state_dict())
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert attach(network(), kernels="measured").masks().keys() == {"0.weight", "2.weight"}
        for name, net in early.items():
            refused = pytest.raises(TrainingError, match=r"none in another(.|\n)*attach after init_process_group")
            with refused if name == "measured" else contextlib.nullcontext():
                steps(net, torch.optim.SGD(net.parameters(), 0.1), 0, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_attach_says_which_layer_it_measures_and_measures_a_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(choose, "measured", lambda call, *_: said.append(call.product) or Choice("torch", False, ""))
    monkeypatch.setattr(Progress, "begin", lambda self, title, total: said.append((self._shown, title, total)))
    monkeypatch.setattr(Progress, "say", lambda self, what: said.append(what))
    alike = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    both_ways.attach(alike, batch(), progress=False)
    begun = (False, "measuring the products of each layer", 3)
    assert said == [begun, "0", "forward", "data", "weight", "1", "2"]


def test_a_gain_within_the_noise_is_none(gaining: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    gaining |= {(64, 32), (48, 64)}
    of_shape = choose.measured

    def measured(call, *given):
        choice = of_shape(call, *given)  # of 6 ms 0.2 are gained in the second layer
        return replace(choice, sparse_ms=1.8) if tuple(call.b.shape) == (48, 64) else choice

    monkeypatch.setattr(choose, "measured", measured)
    handle = attach(network(), kernels="measured")
    first, second = handle.plan.layers
    assert (
        not first.unmasked and first.gain == 4 / 3 and second.unmasked and second.gain == 1
    )  # the first has no data gradient
    forward = second.choices["forward"]
    assert not forward.sparse and forward.kernel == "torch" and forward.reason == "2:4 made up, without a mask"


def test_measured_plan_says_times_and_reasons_and_the_control_is_dense() -> None:
    model = network()
    handle = attach(model, kernels="measured", gradient="2:4", schedule="every=10", seconds=0.01)
    for layer in handle.plan.layers:
        assert set(layer.choices) == {"forward", "data", "weight"} and layer.tokens == TOKENS
        for choice in layer.choices.values():
            assert choice.dense_ms and choice.sparse_ms and choice.sparse == (choice.sparse_ms < choice.dense_ms)
        assert layer.chosen_ms <= layer.dense_ms
    assert re.search(r"0  64 x 32, 24 tokens, float32\n  forward  .*times as (long|fast)", str(handle.plan))
    handle.remove()
    control = attach(model, kernels="dense", seconds=0.01)
    assert not control.masks() and not any(c.sparse for layer in control.plan.layers for c in layer.choices.values())
    assert_near(gradients(model, batch()), gradients(network(), batch()), 2e-6)
    assert control.finish() is model and not masks.of(model)


def test_a_plan_begins_with_a_summary_and_folds_layers_that_are_alike() -> None:
    sparse = Choice("nm_matmul_2x4_f32__x", True, "2.00 times as fast", dense_ms=2.0, sparse_ms=1.0)
    kept = Choice("nm_sddmm_2x4_f32__x", False, "exact", dense_ms=3.0, kept_ms=2.0)
    dense = Choice("onednn", False, "exact", "onednn", dense_ms=4.0)
    choices = {"forward": sparse, "data": dense, "weight": kept}
    layers = [LayerPlan(f"{n}.up", (8, 16), 4, "float32", choices) for n in range(5)]
    layers.append(LayerPlan("head", (8, 16), 4, "float32", choices, note="something"))
    plan = both_ways.Plan(tuple(layers), {"a": "why", "b": "why", "c": "another"})
    assert [choice.ms for choice in choices.values()] == [1.0, 4.0, 2.0]
    assert str(plan).splitlines() == [
        "6 layers: 6 of 18 products run 2:4, 6 at kept places",
        "products of a step, packing included, timed one by one: 54.0 ms dense, 42.0 ms as chosen: 1.29 times as fast",
        "{0-4}.up  x5  8 x 16, 4 tokens, float32",
        *(alike := [f"  {name:<8} {choice}" for name, choice in choices.items()]),
        "head  8 x 16, 4 tokens, float32",
        *alike,
        "  note     something",
        "{a,b}  x2  dense: why",
        "c  dense: another",
    ]


@pytest.fixture
def refilled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were refilled, while nothing is timed: each candidate runs twice, the last is best."""
    names: list[str] = []
    kind = type(weight_kernels(torch.float32, TOKENS, torch.device("cpu"))[0])
    refill = kind.refill

    def counted(kernel, *args):
        names.append(kernel.name)
        return refill(kernel, *args)

    def race(calls, **_):
        for name, run in calls.items():
            for _ in range(2):
                names.clear()
                run()
                assert names == ([] if name in implementations.names(torch.empty(0)) else [name])
        return {name: 1.0 / (1 + place) for place, name in enumerate(calls)}, 0.0

    monkeypatch.setattr(kind, "refill", counted)
    monkeypatch.setattr(chooser, "race", race)
    return names


@pytest.mark.parametrize("schedule", ["fixed", "every=2"])
def test_a_trial_refills_one_layout_and_a_step_those_that_were_chosen(refilled: list[str], schedule: str) -> None:
    assert len(weight_kernels(torch.float32, TOKENS, torch.device("cpu"))) > 1
    model = nn.Sequential(nn.Linear(32, 64))
    handle = attach(model, kernels="measured", schedule=schedule)
    products = model[0].__dict__[CARRIED]
    chosen = [products.plan.choices[product].kernel for product in ("forward", "data")]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        refilled.clear()
        gradients(model, batch())
        assert set(refilled) == set(chosen) and len(refilled) == 2
        optimizer.step()
    both, state = handle.nbytes, handle.state_dict()
    state["choices"]["0.weight"]["forward"].update(kernel="torch", sparse=False)
    handle.load_state_dict(state)
    refilled.clear()
    gradients(model, batch())
    assert refilled == chosen[1:] and handle.nbytes < both, "a kernel that is no longer chosen keeps no layout"


@pytest.mark.parametrize("begin", [0, 1])
def test_the_control_never_has_masks(begin: int) -> None:
    model, plain = network(), network()
    control = attach(model, kernels="dense", schedule="every=2", begin=begin, seconds=0.01)
    for trained in (model, plain):
        steps(trained, torch.optim.SGD(trained.parameters(), 0.1), 0, 4)
    assert control.steps == 4 and not control.masks()
    assert_near(gradients(model, batch()), gradients(plain, batch()), 1e-5)


def test_the_saving_of_the_measured_size_is_the_measured_ratio_and_grows_with_width() -> None:
    dense = {"forward": 3.0, "data gradient": 3.0, "weight gradient": 3.0, "optimizer": 1.0, "other": 2.0}
    sparse = {**dense, "forward": 2.0, "data gradient": 2.0, "pack": 0.5}
    assert saving(dense, sparse).ratio == pytest.approx(12 / 10.5)
    wide = saving(dense, sparse, width=4)
    assert (wide.dense, wide.sparse) == pytest.approx((9 * 16 + 16 + 8, 7 * 16 + 16 + 8 + 8))
    assert saving(dense, sparse, tokens=100).ratio > saving(dense, sparse).ratio
    with pytest.raises(TrainingError, match="cannot be predicted"):
        saving(dense, sparse, width=0)


def test_a_choice_reads_well() -> None:
    assert str(Choice("torch", False, "exact", "torch", 1.0)) == "torch (dense 1.00, exact)"
    assert LayerPlan("a", (4, 4), 1, "float32", {}).dense_ms == 0
