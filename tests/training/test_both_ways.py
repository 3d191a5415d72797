"""Training with 2:4 weights both ways against float64 on the masked weights."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from tests.training.both_ways import LIMIT, PATTERN, assert_near, attach, batch, gradients, network, steps
from tests.turns import in_turn
from twofour import check, masks, prune
from twofour.errors import TrainingError
from twofour.kernels.nm_unbiased import nm_unbiased_reference
from twofour.layers import CARRIED
from twofour.masks import hooks
from twofour.training import both_ways
from twofour.training.both_ways import Choice
from twofour.training.sparse_linear import implementations
from twofour.training.sparse_linear.plan import PRODUCTS


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


def test_the_hooks_of_masks_are_there_before_a_step_puts_the_first_on(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[int] = []
    monkeypatch.setattr(hooks, "install", lambda: installed.append(1))
    attach(network(), begin=2)
    assert installed, "torch refuses hooks that are registered while a step runs its own"


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


def test_a_model_that_is_masked_both_ways_keeps_its_masks() -> None:
    model = prune(network(), {"0": "2:4-transposable", "2": "2:4-transposable"})
    keep = masks.of(model)["0.weight"].keep.clone()
    handle = attach(model)
    assert torch.equal(handle.masks()["0.weight"], keep)
    handle.remove()
    assert torch.equal(masks.of(model)["0.weight"].keep, keep)
