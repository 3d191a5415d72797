"""Training kept values alone against the same training of the dense weight under its mask."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.training.kept_values import OPTIMIZERS, PATTERN, assert_same, attach, batch, losses, network, pair
from twofour import masks, prune
from twofour.errors import TrainingError
from twofour.training import both_ways, sdgp
from twofour.training.sparse_linear import implementations


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_weights_are_those_of_the_dense_weight_under_its_mask(name: str) -> None:
    dense, packed = pair()
    found = [losses(model, OPTIMIZERS[name](model.parameters()), 0, 8, clip=0.5) for model in (dense, packed)]
    assert found[0][0] == found[1][0] and found[1] == pytest.approx(found[0], rel=1e-5)
    assert_same(dense, packed, 1e-4)


@pytest.mark.parametrize(
    ("gradient", "limit"), [("2:4", 1e-5), ("dense", 5e-3)]
)  # torch's product is rounded to bfloat16
def test_autocast_and_the_unbiased_estimate_are_those_of_the_dense_weight(gradient: str, limit: float) -> None:
    found = []
    for state in ("dense", "packed"):
        model = network()
        with torch.autocast("cpu", torch.bfloat16):
            handle = attach(model, state, gradient=gradient, seed=3)
            found.append(losses(model, torch.optim.AdamW(model.parameters(), 1e-2), 0, 4))
        assert handle.attached and {layer.dtype for layer in handle.plan.layers} == {"bfloat16"}
        assert ("nm_sddmm_2x4_" in str(handle.plan)) == (gradient == "dense" and state == "packed")
    assert found[1] == pytest.approx(found[0], rel=limit)


@pytest.mark.parametrize("kernel", ["sparse", "dense"])
def test_gradients_accumulate_at_the_kept_places(kernel: str) -> None:
    dense, packed = pair()
    assert "weight   nm_sddmm_2x4_f32__" in str(packed.handle[0].plan)
    for model in (dense, packed):
        for layer in (model[0], model[2]) if kernel == "dense" else ():
            products = layer.__dict__["_twofour_attached"]
            chosen = {product: both_ways.Choice("torch", False, "") for product in products.plan.choices}
            products.plan = both_ways.LayerPlan(**{**vars(products.plan), "choices": chosen})
        x = batch().requires_grad_()
        for piece in x.chunk(3):
            model(piece).square().sum().backward()
        model.x = x
    masks.enforce(dense)
    parameters = dict(packed.named_parameters())
    assert parameters["0.weight"].shape == parameters["0.weight"].grad.shape == (64, 16)
    assert torch.allclose(packed.x.grad, dense.x.grad, rtol=1e-5, atol=1e-6)
    whole = packed[0].weight
    assert whole.shape == (64, 32) and PATTERN.check(whole.detach()).ok
    keep = dense.handle[0].masks()["0.weight"]
    want = dense[0].weight.grad[keep]
    torch.testing.assert_close(
        parameters["0.weight"].grad.flatten(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max())
    )
    parameters["0.weight"].grad = None
    (whole.abs().sum() * 2).backward()  # a penalty of the dense weight reaches the kept values
    assert torch.equal(parameters["0.weight"].grad, 2 * parameters["0.weight"].sign())


@pytest.mark.parametrize(("name", "most"), [("sgd", 0.55), ("adamw", 0.55), ("adagrad", 0.55)])
def test_weights_and_state_take_half_the_memory(name: str, most: float) -> None:
    dense, packed = pair()
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (dense, packed)]
    for model, optimizer in zip((dense, packed), optimizers, strict=True):
        losses(model, optimizer, 0, 1)
    memory, whole = packed.handle[0].memory, dense.handle[0].memory
    assert memory.dense_weights == whole.dense_weights == 4 * (64 * 32 + 48 * 64)
    assert memory.dense_state == whole.dense_state == whole.state > 0
    assert memory.ratio <= most < 1 < whole.ratio
    assert memory.layouts == whole.layouts > 0
    assert memory.whole_ratio > memory.ratio
    held, dense = memory.weights + memory.state, memory.dense_weights + memory.dense_state
    assert memory.whole_ratio == (held + memory.layouts) / dense
    rows = {line[:16].strip(): line.split()[-1] for line in str(memory).splitlines()}
    assert (rows["together"], rows["with layouts"]) == (f"{memory.ratio:.2f}", f"{memory.whole_ratio:.2f}")


def test_memory_before_the_first_step_says_what_is_not_there_yet() -> None:
    model = network()
    handle = attach(model)
    assert re.search(r"no optimiser has stepped yet.*\nno layouts.*no forward pass yet", str(handle.memory))
    losses(model, optimizer := OPTIMIZERS["adamw"](model.parameters()), 0, 1)
    assert optimizer.state and "yet" not in str(handle.memory)


def test_the_plan_names_the_time_at_kept_places() -> None:
    handle = attach(network(), kernels="measured", seconds=0.01)
    for layer in handle.plan.layers:
        weight = layer.choices["weight"]
        assert weight.kept_ms and weight.dense_ms and not weight.sparse and weight.sparse_ms is None
        assert weight.dense in implementations.names(torch.empty(0))
        assert weight.ms == min(weight.kept_ms, weight.dense_ms)
        assert f"(dense {weight.dense_ms:.2f}, kept places {weight.kept_ms:.2f}, exact, " in str(weight)
        assert layer.chosen_ms <= layer.dense_ms


def test_a_net_of_convolutions_is_sent_to_the_dense_state() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    with pytest.raises(TrainingError, match=r'`?state="packed" is for nn.Linear(.|\n)*try +state="dense"'):
        both_ways.attach(net, torch.randn(1, 3, 8, 8), state="packed")
    both_ways.attach(net, torch.randn(1, 3, 8, 8), state="dense", kernels="sparse").remove()


def test_what_cannot_hold_kept_values_alone_is_refused() -> None:
    model = network()
    for options, said in (
        ({"schedule": "every=2"}, r"pruned values must be there to grow again \(SR-STE\)"),
        ({"kernels": "dense"}, "the control, which has no mask"),
        ({"state": "sparse"}, "`state` is not known"),
    ):
        with pytest.raises(TrainingError, match=said):
            attach(model, **options)
    assert type(model[0]) is nn.Linear
    handle = attach(model)
    with pytest.raises(TrainingError, match="takes no other weight by assignment"):
        model[0].weight = nn.Parameter(torch.zeros(64, 32))
    with pytest.raises(TrainingError, match=r"cannot be reset in place(.|\n)*finish\(\) or remove\(\)"):
        model[0].reset_parameters()
    with pytest.raises(TrainingError, match="2:4 both ways is attached already"):
        sdgp.attach(nn.Sequential(model[0]), "2:4")
    losses(model, torch.optim.SGD(model.parameters(), 0.1), 0, 1)
    before = model.state_dict()
    for make in (
        lambda parameters: torch.optim.Adafactor(parameters),
        lambda parameters: torch.optim.Muon([one for one in parameters if one.ndim == 2]),
    ):
        with pytest.raises(TrainingError, match=r'cannot step kept values alone(.|\n)*state="dense"'):
            losses(model, make(model.parameters()), 0, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    handle.remove()
    sparser = prune(network(), {"0": "2:4-transposable", "2": "2:4-transposable"})
    keep = masks.of(sparser)["0.weight"].keep
    keep[0, keep[0].nonzero()[0]] = False
    with pytest.raises(TrainingError, match=r"(?s)0.weight.*1 values short of two in every four"):
        attach(sparser)
    assert set(masks.of(sparser)) == {"0.weight", "2.weight"} and type(sparser[0]) is nn.Linear


def test_exporting_kept_values_is_refused_with_the_way_out() -> None:
    model = network()
    handle = attach(model)
    with pytest.raises(TrainingError, match=r"is not exported(.|\n)*finish\(\) of the handle"):
        torch.export.export(model, (batch(),))
    with pytest.raises(Exception, match=r"call finish\(\) of the handle before torch.export"):
        torch.export.export(model, (batch(),), strict=True)
    assert torch.export.export(handle.finish(), (batch(),)).module()(batch()).shape == (24, 7)


def test_an_optimizer_whose_state_is_of_rows_is_found_by_its_state() -> None:
    class ByRow(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["row"] = parameter.grad.square().mean(-1)

    model = network()
    handle = attach(model)
    with pytest.raises(TrainingError, match=r"ByRow cannot step kept values alone(.|\n)*state `row` \(64,\)"):
        losses(model, ByRow(model[0].parameters()), 0, 1)
    assert handle.attached


def test_a_mask_that_moves_ends_the_forward_passes_before_it() -> None:
    model = network()
    handle = attach(model)
    other = network(seed=5)
    chosen = attach(other).state_dict()
    loss = model(batch()).sum()
    handle.load_state_dict(chosen)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Centred(torch.optim.SGD):
    """Gradient centralisation (Yong et al. 2020): the mean of a row is of the pruned values too."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim > 1:
                    parameter.grad -= parameter.grad.mean(1, keepdim=True)
        return super().step(closure)


class Nested(torch.optim.SGD):
    """As Shampoo keeps its factors."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["factors"] = {"left": torch.eye(len(parameter))}
        return super().step(closure)


class SingleDeviceMuonWithAuxAdam(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Centred, "a step that mixes values"),
        (Nested, r"state `factors` \(64, 64\) of \(64, 64\) inside a container"),
        (SingleDeviceMuonWithAuxAdam, "a step that is not one of each value by itself"),
        (torch.optim.LBFGS, "a step that is not one of each value by itself"),
    ],
)
@pytest.mark.parametrize("copied", [False, True])
def test_optimizers_that_mix_values_are_refused_before_anything_moves(kind: type, said: str, copied: bool) -> None:
    model = network()
    handle = attach(model)
    if copied:
        model = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.raises(TrainingError, match=said):
        losses(model, optimizer, 0, 1)
    assert_same(model, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and handle.attached


class ByHand(torch.optim.Optimizer):
    """Momentum by sign, as Lion: elementwise, of a class that nobody knows."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.seen = [group["params"] for group in self.param_groups]

    @torch.no_grad()
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.5)
                    parameter.sub_(mean.sign(), alpha=group["lr"])


def test_an_unknown_optimizer_of_single_values_is_tried_and_taken() -> None:
    dense, packed = pair()
    found = []
    for model in (dense, packed):
        optimizer = ByHand(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))  # from a rate of zero
        for step in range(4):
            found += losses(model, optimizer, step, 1)
            schedule.step()
        assert len(optimizer.state) == 5 and schedule.last_epoch == 4
    assert found[4:] == pytest.approx(found[:4], rel=1e-5)


def test_the_dense_weight_has_second_derivatives() -> None:
    model = network()
    handle = attach(model)
    values = dict(model.named_parameters())["0.weight"]
    (gradient,) = torch.autograd.grad(model[0].weight.pow(3).sum(), values, create_graph=True)
    gradient.sum().backward()
    assert torch.allclose(values.grad, 6 * values) and handle.attached


def test_what_a_dense_product_computes_is_counted() -> None:
    model = network()
    handle = attach(model)
    layouts = handle.memory.layouts
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(batch())  # another type than the plan's
    assert handle.memory.layouts == layouts + 2 * (64 * 32 + 48 * 64)


def test_auto_packs_where_all_that_takes_part_can_be(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "twofour.training")
    packed = attach(network(), "auto")
    assert packed.state == "packed" and 'state: "packed"' in caplog.text
    sparser = prune(network(), {"0": "2:4-transposable"})
    keep = masks.of(sparser)["0.weight"].keep
    keep[0, keep[0].nonzero()[0]] = False
    short = attach(sparser, "auto")
    moving, control = (
        attach(network(), "auto", schedule="every=2"),
        attach(network(), "auto", kernels="dense", seconds=0.01),
    )
    net = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Flatten(1), nn.Linear(16, 16))
    convolved = both_ways.attach(net, torch.randn(2, 16, 3, 3), kernels="sparse", state="auto")
    assert len(convolved.layers) == 2
    handles = {
        "fewer than two": short,
        "the mask moves": moving,
        "no mask": control,
        "`0.weight` is no nn.Lin": convolved,
    }
    for why, handle in handles.items():
        assert handle.state == "dense" and re.search(f'state: "dense", since .*{why}', caplog.text), why


def test_several_processes_are_refused() -> None:
    model = network()
    handle = attach(model)
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(TrainingError, match="not trained by several processes yet"):
            losses(model, torch.optim.SGD(model.parameters(), 0.1), 0, 1)
        with pytest.raises(TrainingError, match="not trained by several processes yet"):
            attach(network())
    finally:
        torch.distributed.destroy_process_group()
    assert handle.finish() is model


def test_measured_plans_hold_under_kept_values() -> None:
    model = network()
    handle = attach(model, kernels="measured", seconds=0.01)
    assert "kept values alone" in str(handle)
    for layer in handle.plan.layers:
        assert all(choice.dense_ms for choice in layer.choices.values())
    found = losses(model, torch.optim.SGD(model.parameters(), 0.1), 0, 2)
    assert found[1] < found[0] * 2
