"""Training with 2:4 weights both ways against float64 on the masked weights."""

import contextlib
import copy
import pickle
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.turns import in_turn
from twofour import advise, check, compile, masks, patterns, prune
from twofour.errors import CompileError, PatternError, TrainingError
from twofour.kernels.nm_unbiased import nm_unbiased_reference
from twofour.layers import CARRIED, describe_attached
from twofour.masks import hooks
from twofour.progress import Progress
from twofour.training import both_ways
from twofour.training.both_ways import Choice, LayerPlan, choose, saving
from twofour.training.sparse_linear import chooser, implementations
from twofour.training.sparse_linear.implementations import weight_kernels
from twofour.training.sparse_linear.plan import PRODUCTS

PATTERN = patterns.parse("2:4-transposable")
TOKENS = 24
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48, bias=False), nn.GELU(), nn.Linear(48, 7)).to(
        dtype
    )


def batch(seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, TOKENS // 4, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attach(model: nn.Module, **options) -> both_ways.BothWays:
    options = {"kernels": "sparse", **options}
    return both_ways.attach(model, batch(dtype=next(model.parameters()).dtype), **options)


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output, input gradient and parameter gradients of one step."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.float().square().sum().backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def assert_near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], limit: float) -> None:
    for name, value in want.items():
        error = (got[name].double() - value.double()).norm() / value.double().norm()
        assert error <= limit, (name, float(error))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


@in_turn("dtype", [torch.float32, torch.bfloat16])
@in_turn("schedule", ["fixed", "every=3"])
def test_forward_and_gradients_equal_float64_on_masked_weights(isa: str, dtype: torch.dtype, schedule: str) -> None:
    model = network(dtype)
    handle = attach(model, schedule=schedule)
    assert [layer.name for layer in handle.plan.layers] == ["0", "2"] and "4.weight" in handle.plan.skipped
    reference = network(dtype).double()
    for name, keep in handle.masks().items():
        assert PATTERN.check(keep.float()).ok
        reference.get_parameter(name).data.mul_(keep)
    x = batch(dtype=dtype)
    assert_near(gradients(model, x), gradients(reference, x.double()), LIMIT[dtype])


def convolutions(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    wide, narrow = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1, bias=False)
    taps, strided = nn.Conv2d(32, 80, 3, padding=1), nn.Conv2d(80, 32, (3, 1), 2, dilation=(2, 1), bias=False)
    return nn.Sequential(wide, nn.GELU(), taps, nn.GELU(), strided, nn.GELU(), narrow).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_convolutions_against_float64(isa: str, dtype: torch.dtype, form) -> None:
    model = convolutions(dtype).to(memory_format=form)
    x = torch.randn(2, 16, 9, 7).to(dtype).contiguous(memory_format=form)
    handle = both_ways.attach(model, x, kernels="sparse")
    layers = {layer.name: layer for layer in handle.plan.layers}
    assert {name: layer.tokens for name, layer in layers.items()} == {"0": 126, "2": 126, "4": 24, "6": 24}
    sparse = {(name, of) for name, layer in layers.items() for of, choice in layer.choices.items() if choice.sparse}
    pointwise = {(name, of) for name in "06" for of in ("forward", "data")}
    more = {("2", "forward"), ("2", "data"), ("4", "forward")} if dtype is torch.float32 else set()
    assert sparse == pointwise | more, "the data gradient of a stride is dense, bfloat16 has no convolutions"
    reference = convolutions(dtype).double()
    for name, keep in handle.masks().items():
        assert PATTERN.check(keep.float().movedim(1, -1)).ok
        reference.get_parameter(name).data.mul_(keep)
    want = gradients(reference, x.double())
    for net in (model, copy.deepcopy(model)):
        got = gradients(net, x)
        assert_near(got, want, LIMIT[dtype])
        assert got["y"].is_contiguous(memory_format=form)
        assert_near({"y": net(x[0])}, {"y": want["y"][0]}, LIMIT[dtype])  # an image without a batch
    copied = copy.deepcopy(model)
    both_ways.finish(copied)
    handle.finish()
    for net in (model, copied):
        assert type(net[0]) is type(net[2]) is nn.Conv2d and check(net).ok
        assert list(masks.of(net)) == ["0.weight", "2.weight", "4.weight", "6.weight"]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo's own
def test_a_compiled_net_of_convolutions_is_one_graph() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 3, 2, bias=False)
    net = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    x = torch.randn(2, 16, 6, 6).contiguous(memory_format=torch.channels_last)
    handle = both_ways.attach(net, x, kernels="sparse")
    run = torch.compile(net, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), 0.05, fused=True)
    for _ in range(3):
        want, got = gradients(net, x), gradients(run, x)
        assert_near(got, {name: want[name.removeprefix("_orig_mod.")] for name in got}, 1e-6)
        optimizer.step()  # the layouts follow
    handle.finish()


def test_convolutions_that_cannot_take_part_are_named() -> None:
    kinds = {
        "groups": nn.Conv2d(16, 16, 3, padding=1, groups=2),
        "padding_mode": nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"),
        "uneven": nn.Conv2d(16, 16, (2, 1), padding="same"),
        "only nn.Linear": nn.Conv3d(16, 16, 1),
        "served": nn.Conv2d(16, 16, 3),
    }
    for options, left in (({}, ""), ({"state": "packed"}, 'state="packed"'), ({"kernels": "dense"}, "one dense way")):
        net = nn.ModuleDict({name.replace(".", " "): layer for name, layer in kinds.items()})
        net["linear"] = nn.Linear(16, 16)
        net.forward = lambda x, net=net: net["linear"](net["served"](x).movedim(1, -1))
        handle = both_ways.attach(net, torch.randn(1, 16, 4, 4), **{"kernels": "sparse", **options})
        for name in kinds:
            said = handle.plan.skipped.get(f"{name.replace('.', ' ')}.weight", "")
            assert left in said if name == "served" else name in said or left in said, (name, said)
        handle.remove()


@pytest.mark.parametrize("schedule", ["fixed", "every=20"])
def test_200_steps_of_convolutions_have_the_losses_of_torch(schedule: str) -> None:
    x = torch.randn(3, 16, 12, generator=torch.Generator().manual_seed(1))
    losses: dict[str, list[float]] = {}
    for kernels in ("sparse", "torch"):
        torch.manual_seed(0)
        layers = nn.Conv1d(16, 32, 1), nn.ReLU(), nn.Unflatten(1, (32, 1)), nn.Conv2d(32, 16, (1, 3)), nn.ReLU()
        net = nn.Sequential(*layers, nn.Flatten(2), nn.Conv1d(16, 8, 1))
        handle = both_ways.attach(net, x, kernels="sparse", schedule=schedule)
        if kernels == "torch":  # the products of the masked weights as torch computes them
            for layer in (net[0], net[3], net[6]):
                products = layer.__dict__[CARRIED]
                products.plan = replace(products.plan, choices={n: Choice("torch", False, "") for n in PRODUCTS})
        optimizer = torch.optim.AdamW(net.parameters(), 3e-3, fused=True)
        losses[kernels] = []
        for _ in range(200):
            optimizer.zero_grad()
            loss = (net(x) - x[:, :8, 1:-1]).square().mean()
            loss.backward()
            optimizer.step()
            losses[kernels].append(loss.item())
        handle.finish()
    assert losses["sparse"] == pytest.approx(losses["torch"], rel=1e-5)
    assert losses["sparse"][-1] < losses["sparse"][0] / 2


def test_both_axes_stay_two_of_four_for_any_optimiser() -> None:
    for make in (
        lambda p: torch.optim.AdamW(p, 1e-2),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    ):
        model = network()
        handle = attach(model)
        steps(model, make(model.parameters()), 0, 3)
        assert all(PATTERN.check(model.get_parameter(name)).ok for name in handle.masks())
        plain = copy.deepcopy(model)
        want = model(batch(9))
        handle.remove()
        assert torch.allclose(model(batch(9)), want, rtol=1e-4, atol=1e-5), "the packed weights followed the steps"
        assert torch.equal(plain(batch(9)), want), "a copy runs by itself"
        assert type(model[0]) is nn.Linear and not masks.of(model)


def test_the_state_dict_keeps_the_dense_keys_and_loading_moves_the_packed_weights() -> None:
    model, other = network(), network(seed=5)
    handle = attach(model)
    assert list(model.state_dict()) == list(network().state_dict())
    prune(other, {"0": "2:4-transposable", "2": "2:4-transposable"})
    model(batch())
    model.load_state_dict(other.state_dict())
    assert torch.allclose(model(batch()), other(batch()), rtol=1e-4, atol=1e-5)
    assert torch.equal(handle.masks()["0.weight"], masks.of(other)["0.weight"].keep)


@pytest.mark.parametrize("options", [{}, {"schedule": "every=2", "gradient": "2:4"}, {"begin": 2, "gradient": "2:4"}])
@pytest.mark.parametrize("handle_first", [False, True])
def test_resumed_is_as_if_never_stopped(options: dict[str, object], handle_first: bool) -> None:
    whole, part = network(), network()
    one, two = attach(whole, **options), attach(part, **options)
    first, second = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (whole, part))
    steps(whole, first, 0, 6)
    steps(part, second, 0, 3)
    resumed = network(seed=3)
    third = attach(resumed, **options)
    optimizer = torch.optim.AdamW(resumed.parameters(), 1e-2)
    loaded = [(resumed, part), (optimizer, second), (third, two)]
    for mine, theirs in loaded[2:] + loaded[:2] if handle_first else loaded:
        mine.load_state_dict(theirs.state_dict())
    steps(resumed, optimizer, 3, 3)
    assert one.steps == third.steps == 6
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize("options", [{"gradient": "2:4"}, {"schedule": "every=2"}, {"begin": 3}])
def test_a_state_of_other_arguments_is_refused(options: dict[str, object]) -> None:
    state, handle = attach(network(), **options).state_dict(), attach(network())
    before = str(handle.plan)
    with pytest.raises(
        TrainingError, match=f"other arguments(?s:.*){next(iter(options))}.*{next(iter(options.values()))}"
    ):
        handle.load_state_dict(state)
    assert str(handle.plan) == before
    del state["arguments"]  # as older states have none
    handle.load_state_dict({**state, "masks": {}})


@pytest.mark.parametrize(("form", "name"), [({"gradient": "2:4"}, "seed"), ({"schedule": "every=2"}, "decay")])
def test_what_a_form_of_training_goes_by_is_part_of_its_state(form: dict[str, str], name: str) -> None:
    state, other = attach(network(), **form, **{name: 7}).state_dict(), attach(network(), **form)
    with pytest.raises(TrainingError, match=f"other arguments\n  got +.'{name}': 7"):
        other.load_state_dict(state)
    exact = attach(network(), **{name: 7}).state_dict()  # goes by neither
    attach(network()).load_state_dict(exact)


def test_moving_masks_follow_the_dense_weight_and_pruned_values_decay() -> None:
    model = network()
    handle = attach(model, schedule="every=2", decay=0.5)
    weight = model[0].weight
    before, keep = weight.detach().clone(), handle.masks()["0.weight"].clone()
    assert not PATTERN.check(weight).ok
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.zero_grad()
    model(batch()).square().mean().backward()
    exact = weight.grad.clone()
    optimizer.step()
    # Masked weight decay: once a step, pruned values alone, before the optimiser: w - lr (g + decay (1 - mask) w).
    assert torch.allclose(weight, before - 0.1 * (exact + 0.5 * before * ~keep), atol=1e-7)
    with torch.no_grad():
        weight.mul_(torch.randn_like(weight))
    assert torch.equal(handle.masks()["0.weight"], keep)
    steps(model, optimizer, 1, 1)
    moved = handle.masks()["0.weight"]
    assert handle.flips and not torch.equal(moved, keep)
    assert torch.equal(moved, PATTERN.project(weight, absolute=True))
    want = functional.linear(batch(), weight * moved, model[0].bias)
    assert torch.allclose(model[0](batch()), want, atol=1e-5)
    finished = handle.finish()
    assert finished is model and PATTERN.check(weight).ok and check(model).layers
    assert torch.allclose(model[0](batch()), want, atol=1e-5)


def test_decay_is_added_once_a_step_whatever_is_accumulated() -> None:
    found = []
    for parts in (1, 2):
        model = network()
        attach(model, schedule="every=9", decay=0.3)
        for piece in batch().chunk(parts):
            (model(piece).square().sum() / 100).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        found.append(model[0].weight.detach().clone())
    assert torch.allclose(found[0], found[1], atol=1e-6)


def test_dense_first_then_sparse() -> None:
    model, dense = network(), network()
    handle = attach(model, begin=2)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, dense)]
    for m, optimizer in zip((model, dense), optimizers, strict=True):
        steps(m, optimizer, 0, 1)
    assert not handle.masks() and torch.allclose(model[0].weight, dense[0].weight, atol=1e-6)
    steps(model, optimizers[0], 1, 1)
    assert handle.masks() and PATTERN.check(model[0].weight).ok
    assert handle.finish() is model and set(masks.of(model)) == {"0.weight", "2.weight"}


def test_the_sparse_weight_gradient_is_the_estimate_times_x_and_unbiased() -> None:
    model = nn.Sequential(nn.Linear(16, 8))
    x, gradient = torch.randn(32, 16), torch.randn(32, 8) ** 3
    handle = both_ways.attach(model, x, kernels="sparse", gradient="2:4", seed=11)
    products = model[0].__dict__[CARRIED]
    exact = gradient.T.double() @ x.double()
    total = torch.zeros(8, 16, dtype=torch.float64)
    rounds = 1500
    squares = torch.zeros_like(total)
    for call in range(1, rounds + 1):
        found = products.weight_gradient(gradient, x, torch.float32).double()
        if call < 4:
            seed = (products.sources["weight"].seed + call * 0x9E3779B1) & 0xFFFFFFFF
            want = nm_unbiased_reference(gradient, seed).T.double() @ x.double()
            assert (found - want).norm() <= 1e-6 * want.norm()
        total += found
        squares += (found - exact).square()
    standard = (squares / rounds / rounds).sqrt()
    assert ((total / rounds - exact).abs() <= 5 * standard).all()
    model[0](x).backward(gradient)
    assert torch.allclose(model[0].bias.grad, gradient.sum(0), atol=1e-5), "the bias gradient is exact"
    assert handle.state_dict()["calls"] == {"0.weight": rounds + 1}


def test_seeds_decide_the_estimates() -> None:
    def run(seed: int) -> torch.Tensor:
        model = network()
        attach(model, gradient="2:4", seed=seed)
        return gradients(model, batch())["0.weight"]

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


def test_tokens_that_are_no_multiple_of_four_get_the_exact_weight_gradient() -> None:
    model, exact = network(), network()
    attach(model, gradient="2:4")
    attach(exact)
    assert_near(gradients(model, batch()[:1, :3]), gradients(exact, batch()[:1, :3]), 1e-6)


@pytest.mark.parametrize("dense", ["", *implementations.names(torch.empty(0))])
def test_an_empty_batch_has_empty_gradients(dense: str) -> None:
    model = network()
    attach(model, gradient="2:4")
    for layer in (model[0], model[2]) if dense else ():
        products = layer.__dict__[CARRIED]
        chosen = dict.fromkeys(products.plan.choices, Choice(dense, False, "", dense))
        products.plan = replace(products.plan, choices=chosen)
    for shape in ((0, 32), (0, 4, 32), (4, 0, 32)):
        found = gradients(model, torch.zeros(shape))
        assert found["y"].shape == (*shape[:-1], 7) and found["x"].shape == shape
        assert not found["0.weight"].any()


def test_what_is_put_over_a_layer_later_goes_first() -> None:
    model = network()
    handle = attach(model)
    parametrize.register_parametrization(model[0], "bias", nn.Identity())
    with pytest.raises(TrainingError, match="a layer cannot get its own class back"):
        handle.remove()
    parametrize.remove_parametrizations(model[0], "bias")
    assert handle.remove() is model and type(model[0]) is nn.Linear


def test_a_second_derivative_is_refused() -> None:
    model = network()
    attach(model)
    x = batch().requires_grad_()
    with pytest.raises(TrainingError, match="a gradient under 2:4 both ways has no derivative"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def test_autocast_with_float32_parameters() -> None:
    model, plain = network(), network()
    with torch.autocast("cpu", torch.bfloat16):
        handle = attach(model, gradient="2:4")
        got = gradients(model, batch())
    assert {layer.dtype for layer in handle.plan.layers} == {"bfloat16"}
    for name, keep in handle.masks().items():
        plain.get_parameter(name).data.mul_(keep)
    with torch.autocast("cpu", torch.bfloat16):
        want = gradients(plain, batch())
    assert got["0.weight"].dtype == torch.float32
    assert_near({"y": got["y"], "x": got["x"]}, {"y": want["y"], "x": want["x"]}, 2e-2)
    model.eval()
    with torch.no_grad():  # another type than the plan's: dense, exact
        assert torch.allclose(model(batch()), plain(batch()), atol=1e-5)


@pytest.fixture
def gaining(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Sizes (rows, columns) of operands B that are multiplied faster 2:4, while nothing is timed."""
    sizes: set[tuple[int, int]] = set()

    def measured(call, source, seconds, more=None):
        kernels, why = source.kernels(call)
        gains = bool(kernels) and tuple(call.b.shape) in sizes
        times = {"dense_ms": 2.0, "sparse_ms": (1.0 if gains else 3.0) if kernels else None}
        return Choice(kernels[0].name if gains else "torch", gains, why or "made up", **times)

    monkeypatch.setattr(choose, "measured", measured)
    return sizes


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


@pytest.mark.parametrize("state", ["dense", "packed"])
def test_a_model_that_an_earlier_version_pickled_trains_on(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    model = network()
    attach(model, state=state)
    kind = type(model[0].__dict__[CARRIED])
    later, whole = {"anew", "_plans"}, kind.__getstate__
    earlier = lambda products: {name: held for name, held in whole(products).items() if name not in later}  # noqa: E731
    monkeypatch.setattr(kind, "__getstate__", earlier)
    old = pickle.loads(pickle.dumps(model))
    assert_near(gradients(old, batch()), gradients(model, batch()), 1e-7)
    with torch.autocast("cpu", torch.bfloat16):
        old(batch()).float().sum().backward()


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


@pytest.mark.parametrize("masked_there", [False, True])
def test_resumed_layers_have_masks_as_the_interrupted_run_had(
    gaining: set[tuple[int, int]], masked_there: bool
) -> None:
    """What gains is measured, and may come out otherwise in another process."""
    of_second = {(48, 64), (64, 48)}

    def attached(masked: bool, seed: int = 0) -> tuple[nn.Module, both_ways.BothWays, torch.optim.Optimizer]:
        gaining.clear()
        gaining.update({(64, 32), (32, 64)} | (of_second if masked else set()))
        model = network(seed=seed)
        handle = attach(model, kernels="measured")
        return model, handle, torch.optim.AdamW(model.parameters(), 1e-2)

    whole, _kept, optimizer = attached(masked_there)
    part, handle, interrupted = attached(masked_there)
    steps(whole, optimizer, 0, 6)
    steps(part, interrupted, 0, 3)
    saved = copy.deepcopy((handle.state_dict(), part.state_dict(), interrupted.state_dict()))
    resumed, third, after = attached(not masked_there, seed=3)
    for one, state in zip((third, resumed, after), saved, strict=True):
        one.load_state_dict(copy.deepcopy(state))
    assert third.plan.layers[1].unmasked is not masked_there
    steps(resumed, after, 3, 3)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    other, fourth, late = attached(not masked_there, seed=4)
    for one, state in zip((other, late, fourth), (saved[1], saved[2], saved[0]), strict=True):
        one.load_state_dict(copy.deepcopy(state))  # the model before the handle
    if not masked_there:
        stranger = network()
        steps(stranger, torch.optim.SGD(stranger.parameters(), 0.1), 0, 1)
        lost = r"`2.weight`: a layer has lost(.|\n)*then model.load_state_dict"
        for going_on in (
            lambda: steps(other, late, 3, 3),
            fourth.finish,
            fourth.remove,
            lambda: steps(other, late, 3, 1),
        ):
            with pytest.raises(TrainingError, match=lost):
                going_on()
        for one, state in zip((other, late), saved[1:], strict=True):
            one.load_state_dict(state)
    steps(other, late, 3, 3)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in whole.state_dict().items())


def test_a_state_decides_about_masks_in_all_types_that_were_met(gaining: set[tuple[int, int]]) -> None:
    gaining.update({(64, 32), (32, 64)})
    state = attach(network(), kernels="measured", schedule="every=2").state_dict()
    assert state["unmasked"] == ["2.weight"]
    gaining.update({(48, 64), (64, 48)})
    model = network()
    handle = attach(model, kernels="measured", schedule="every=2")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for loaded in (False, True):
        if loaded:
            gradients(model, batch())
            handle.load_state_dict(state)  # its plan is of float32
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                model(batch()).float().square().mean().backward()
            optimizer.step()
    assert {layer.dtype for layer in handle.plan.layers} == {"bfloat16"} and list(handle.masks()) == ["0.weight"]
    handle.finish()
    assert list(masks.of(model)) == ["0.weight"]


def test_kept_values_alone_refuse_layers_that_had_no_mask(gaining: set[tuple[int, int]]) -> None:
    gaining.update({(64, 32), (32, 64)})
    state = attach(network(), kernels="measured").state_dict()
    model = network()
    packed = attach(model, state="packed")
    with pytest.raises(TrainingError, match=r'without a mask(.|\n)*first `2.weight`(.|\n)*state="dense"'):
        packed.load_state_dict(state)
    packed.finish()
    assert masks.of(model).keys() == {"0.weight", "2.weight"}
    packed = attach(network(), state="packed")
    packed.load_state_dict(attach(network()).state_dict())


def test_an_earlier_version_that_was_to_begin_later_masks_all_layers(gaining: set[tuple[int, int]]) -> None:
    assert not gaining
    model = network()
    state = attach(network(), begin=3).state_dict()
    for later in ("unmasked", "types"):
        del state[later]
    handle = attach(model, kernels="measured", begin=3)
    handle.load_state_dict(state)
    steps(model, torch.optim.SGD(model.parameters(), 0.1), 0, 3)
    assert handle.masks().keys() == {"0.weight", "2.weight"}


@pytest.mark.parametrize("part", ["choices", "types", "functions", "unmasked", "arguments"])
def test_a_state_with_a_part_that_is_none_of_ours_is_refused(part: str) -> None:
    handle = attach(network())
    with pytest.raises(TrainingError, match=r"state is of another model|state was taken with other arguments"):
        handle.load_state_dict({**handle.state_dict(), part: 3})


@pytest.mark.parametrize("dense", implementations.names(torch.empty(0)))
def test_every_dense_forward_takes_a_float32_bias_under_autocast(dense: str) -> None:
    model = network()
    with torch.autocast("cpu", torch.bfloat16):
        attach(model, kernels="dense", seconds=0.01)
        products = model[0].__dict__[CARRIED]
        products.plan = replace(products.plan, choices=dict.fromkeys(products.plan.choices, Choice(dense, False, "")))
        got, want = gradients(model, batch()), gradients(network(), batch())
    assert_near({"y": got["y"], "x": got["x"]}, {"y": want["y"], "x": want["x"]}, 2e-2)


def test_weights_written_through_data_are_seen_after_a_step() -> None:
    class Raw(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad.data, alpha=0.1)

    model = network()
    attach(model)
    steps(model, Raw(model.parameters()), 0, 2)
    weight, bias = model[0].weight, model[0].bias
    assert torch.allclose(model[0](batch()), functional.linear(batch(), weight, bias), atol=1e-5)


def test_a_weight_changed_between_forward_and_backward_is_refused() -> None:
    model = network()
    attach(model)
    y = model(batch())
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


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


def test_the_hooks_of_masks_are_there_before_a_step_puts_the_first_on(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[int] = []
    monkeypatch.setattr(hooks, "install", lambda: installed.append(1))
    attach(network(), begin=2)
    assert installed, "torch refuses hooks that are registered while a step runs its own"


@pytest.mark.parametrize("begin", [0, 1])
def test_the_control_never_has_masks(begin: int) -> None:
    model, plain = network(), network()
    control = attach(model, kernels="dense", schedule="every=2", begin=begin, seconds=0.01)
    for trained in (model, plain):
        steps(trained, torch.optim.SGD(trained.parameters(), 0.1), 0, 4)
    assert control.steps == 4 and not control.masks()
    assert_near(gradients(model, batch()), gradients(plain, batch()), 1e-5)


@pytest.mark.parametrize("schedule", ["fixed", "every=2"])
def test_a_weight_that_is_not_finite_leaves_the_model_as_it_was(schedule: str) -> None:
    model = network()
    with torch.no_grad():
        model[2].weight[3, 4] = float("nan")
    with pytest.raises(PatternError, match=r"(?s).*`2"):
        attach(model, schedule=schedule)
    assert type(model[0]) is type(model[2]) is nn.Linear and not masks.of(model)
    assert not describe_attached(model)


def test_memory_beside_the_dense_model_is_what_the_handle_says() -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    handle = both_ways.attach(model, torch.randn(8, 512), kernels="sparse")
    model(torch.randn(8, 512, requires_grad=True)).sum().backward()
    # A mask of a byte, and W and W^T of at most 2.6 bytes each, for a dense value of four.
    assert 0 < handle.nbytes <= 512 * 512 * (1 + 2 * 2.6) + 4096


def test_parts_are_timed() -> None:
    model = network()
    attach(model, gradient="2:4")
    with both_ways.timed() as seconds:
        gradients(model, batch())
    assert set(seconds) == set(both_ways.PARTS) and all(value > 0 for value in seconds.values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "sometimes"}, "the schedule is not known"),
        ({"schedule": "every=0"}, "the schedule is not known"),
        ({"gradient": "4:8"}, "`gradient` is not known"),
        ({"kernels": "fast"}, "`kernels` is not known"),
        ({"begin": -1}, "an argument is impossible"),
        ({"decay": float("nan")}, "an argument is impossible"),
        ({"skip": ["0", "2"]}, "no layer can be trained both ways"),
    ],
)
def test_impossible_arguments_are_refused(options: dict[str, object], said: str) -> None:
    model = network()
    with pytest.raises(TrainingError, match=said) as caught:
        attach(model, **options)
    assert "try" in str(caught.value) and type(model[0]) is nn.Linear


@pytest.mark.parametrize("state", ["dense", "packed"])
def test_a_model_in_training_is_not_compiled(state: str) -> None:
    model = network()
    handle = attach(model, state=state)
    for given in (model, copy.deepcopy(model)):
        for refuses in (partial(compile, example=batch()), advise):
            said = r"middle of its training\n  got +2:4 both ways on `0`, `2`\n(.|\n)*finish\(\) of the handle"
            with pytest.raises(CompileError, match=said):
                refuses(given)
    assert compile(handle.finish(), batch(), graph=False).plan.layers


def test_a_batch_with_its_targets_is_no_example() -> None:
    with pytest.raises(TrainingError, match=r"does not run on the example(.|\n)*without targets"):
        both_ways.attach(network(), (batch(), batch()))


def test_models_that_cannot_take_part_are_refused() -> None:
    model = network()
    handle = attach(model)
    with pytest.raises(TrainingError, match="trained both ways already"):
        attach(model)
    state = handle.state_dict()
    handle.remove()
    with pytest.raises(TrainingError, match="is over"):
        handle.finish()
    with pytest.raises(TrainingError, match="state is of another model"):
        attach(nn.Sequential(nn.Linear(32, 64))).load_state_dict(state)
    prune(model, "2:4")
    with pytest.raises(TrainingError, match=r'masked already(.|\n)*try +prune it again: .*"2:4-transposable"'):
        attach(model)
    with pytest.raises(TrainingError, match=r"no layer can be trained both ways(.|\n)*float64"):
        both_ways.attach(network(torch.float64), batch().double(), kernels="sparse")


def test_a_model_that_is_masked_both_ways_keeps_its_masks() -> None:
    model = prune(network(), {"0": "2:4-transposable", "2": "2:4-transposable"})
    keep = masks.of(model)["0.weight"].keep.clone()
    handle = attach(model)
    assert torch.equal(handle.masks()["0.weight"], keep)
    handle.remove()
    assert torch.equal(masks.of(model)["0.weight"].keep, keep)


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


def test_an_empty_example_is_named() -> None:
    with pytest.raises(TrainingError, match=r"the example is empty[\s\S]*sees 0 tokens[\s\S]*a batch with samples"):
        both_ways.attach(nn.Sequential(nn.Linear(64, 64)), torch.ones(0, 64))
