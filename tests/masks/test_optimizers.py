"""After real steps of every optimiser: legal on the reduction axis, no pruned state, and equal to masking by hand."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import twofour
from tests.turns import in_turn
from twofour import layers, masks, patterns

STEPS = 50

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05),
    "sgd-momentum-nesterov-decay": partial(SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.05),
    "sgd-foreach": partial(SGD, lr=0.02, momentum=0.9, weight_decay=0.05, foreach=True),
    "sgd-fused": partial(SGD, lr=0.02, momentum=0.9, weight_decay=0.05, fused=True),
    "sgd-maximize": partial(SGD, lr=0.001, momentum=0.9, maximize=True),
    "adam": partial(Adam, lr=0.01),
    "adam-amsgrad-decay": partial(Adam, lr=0.01, amsgrad=True, weight_decay=0.05),
    "adam-foreach": partial(Adam, lr=0.01, amsgrad=True, foreach=True),
    "adam-fused": partial(Adam, lr=0.01, amsgrad=True, fused=True),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "adamw-foreach": partial(AdamW, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw-fused": partial(AdamW, lr=0.01, weight_decay=0.1, fused=True),
    "nadam": partial(NAdam, lr=0.01),
    "radam": partial(RAdam, lr=0.01),
    "adamax": partial(Adamax, lr=0.01),
    "rmsprop-centered-momentum": partial(RMSprop, lr=0.005, centered=True, momentum=0.5),
    "adagrad": partial(Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": partial(Adadelta, lr=1.0),
    "adafactor": partial(Adafactor, lr=0.02),
    "asgd": partial(ASGD, lr=0.02),
    "rprop": partial(Rprop, lr=0.001),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 1),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.Tanh(),
        nn.Linear(32, 8),
    )


def masked(model: nn.Module, pattern: str = "2:4") -> nn.Module:
    chosen = patterns.parse(pattern)
    for prunable in layers.walk(model).weights:
        scores = prunable.reduction_last(prunable.parameter.detach())
        masks.attach(prunable, prunable.from_reduction_last(chosen.project(scores, absolute=True)), chosen)
    return model


def batches(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 16, 2, 2, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.ndim >= 2}


def illegal_groups(weight: Tensor) -> int:
    """Count groups of four input channels with more than two non-zeros, without the package's own code."""
    out, reduction = weight.shape[:2]
    columns = weight.detach().reshape(out, reduction // 4, 4, -1)
    return int(((columns != 0).sum(2) > 2).sum())


def assert_sparse(model: nn.Module, before: dict[str, Tensor], *optimizers: Optimizer) -> None:
    assert twofour.check(model).ok
    for name, weight in weights_of(model).items():
        pruned = before[name] == 0
        assert pruned.float().mean() == 0.5
        assert illegal_groups(weight) == 0, name
        assert (weight[pruned] == 0).all(), name
        assert not torch.signbit(weight[pruned]).any(), f"{name}: -0.0 is left"
        assert (weight[~pruned] != before[name][~pruned]).float().mean() > 0.9, f"{name} was not trained"
        for optimizer in optimizers:
            for key, state in optimizer.state.get(weight, {}).items():
                if isinstance(state, Tensor) and state.shape == weight.shape:
                    assert (state[pruned] == 0).all(), f"{name}: {key}"


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights_of(model).items()}


@in_turn("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_weights_stay_sparse(make: Callable[..., Optimizer]) -> None:
    torch.manual_seed(0)
    model = masked(network())
    before, keys = copies(model), list(model.state_dict())
    optimizer = make(model.parameters())
    for batch in batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    assert_sparse(model, before, optimizer)
    assert list(model.state_dict()) == keys == list(network().state_dict())


@in_turn("name", ["sgd", "sgd-momentum-nesterov-decay", "sgd-fused", "adam", "adamw-foreach", "adafactor"])
def test_training_equals_masking_by_hand(name: str) -> None:
    torch.manual_seed(0)
    model = masked(network())
    reference = network()
    reference.load_state_dict(model.state_dict())
    keep = {key: weight != 0 for key, weight in copies(model).items()}
    ours, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](reference.parameters())
    for batch in batches(STEPS):
        for net, optimizer in ((model, ours), (reference, theirs)):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            if net is reference:
                for key, weight in weights_of(net).items():
                    assert weight.grad is not None
                    weight.grad.mul_(keep[key])
            optimizer.step()
        with torch.no_grad():
            for key, weight in weights_of(reference).items():
                weight.mul_(keep[key])
    for key, value in reference.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


def test_lbfgs_never_leaves_the_pattern_within_a_step() -> None:
    torch.manual_seed(0)
    model = masked(network())
    before = copies(model)
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=10, line_search_fn="strong_wolfe")
    (batch,) = batches(1)

    def closure() -> Tensor:
        assert all(illegal_groups(weight) == 0 for weight in weights_of(model).values())
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    first = closure().item()
    for _ in range(3):
        optimizer.step(closure)
    assert_sparse(model, before, optimizer)
    assert closure().item() < first / 2
    pruned = [
        before[name] == 0 if name in before else torch.zeros_like(value) for name, value in model.named_parameters()
    ]
    direction = optimizer.state[optimizer._params[0]]["d"]
    assert (direction[torch.cat([flat.flatten().bool() for flat in pruned])] == 0).all()


@pytest.mark.parametrize("name", ["sgd-momentum-nesterov-decay", "adam"])
def test_a_closure_gets_masked_gradients(name: str) -> None:
    torch.manual_seed(0)
    by_closure = masked(network())
    plainly = copy.deepcopy(by_closure)
    before = copies(by_closure)
    first, second = OPTIMIZERS[name](by_closure.parameters()), OPTIMIZERS[name](plainly.parameters())
    for batch in batches(20):

        def closure(batch: tuple[Tensor, Tensor] = batch) -> Tensor:
            first.zero_grad()
            loss = loss_of(by_closure, batch)
            loss.backward()
            return loss

        assert first.step(closure=closure) is not None
        second.zero_grad()
        loss_of(plainly, batch).backward()
        second.step()
    assert_sparse(by_closure, before, first)
    for key, value in plainly.state_dict().items():
        assert torch.equal(value, by_closure.state_dict()[key])


def test_state_of_an_earlier_dense_training_is_cleared() -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = Adam(model.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1)
    data = batches(10)
    for index, batch in enumerate(data):
        if index == 5:
            masked(model)
            before = copies(model)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    assert_sparse(model, before, optimizer)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradient_accumulation(to_none: bool) -> None:
    torch.manual_seed(0)
    model = masked(network())
    before = copies(model)
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for index, batch in enumerate(batches(STEPS)):
        (loss_of(model, batch) / 4).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    assert_sparse(model, before, optimizer)


@pytest.mark.parametrize("make", [partial(SGD, lr=0.02, momentum=0.9), partial(AdamW, lr=0.01, fused=True)])
def test_amp_with_a_scaler(make: Callable[..., Optimizer]) -> None:
    torch.manual_seed(0)
    model = masked(network())
    before = copies(model)
    optimizer, scaler = make(model.parameters()), torch.amp.GradScaler("cpu")
    for batch in batches(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
    assert_sparse(model, before, optimizer)


def test_two_models_with_two_optimizers_and_one_optimizer_over_both() -> None:
    torch.manual_seed(0)
    left, right = masked(network()), masked(network())
    before = copies(left), copies(right)
    first, second = SGD(left.parameters(), lr=0.02, momentum=0.9), AdamW(right.parameters(), lr=0.01)
    for batch in batches(STEPS):
        for model, optimizer in ((left, first), (right, second)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    both = AdamW([*left.parameters(), *right.parameters()], lr=0.01)
    for batch in batches(5):
        both.zero_grad()
        (loss_of(left, batch) + loss_of(right, batch)).backward()
        both.step()
    assert_sparse(left, before[0], first, both)
    assert_sparse(right, before[1], second, both)


def test_pruned_entries_that_are_not_finite_become_zero() -> None:
    torch.manual_seed(0)
    model = masked(nn.Sequential(nn.Linear(32, 32)))
    before = copies(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    (weight,) = weights_of(model).values()
    model(torch.randn(4, 32)).sum().backward()
    assert weight.grad is not None
    weight.grad[before["0.weight"] == 0] = float("nan")
    optimizer.step()
    assert_sparse(model, before, optimizer)


def test_muon_and_an_averaged_copy() -> None:
    torch.manual_seed(0)
    model = masked(nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False)))
    average = AveragedModel(model, use_buffers=True, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    before = copies(model)
    optimizer = Muon(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    assert_sparse(model, before, optimizer)
    assert_sparse(average.module, before)


class CodedState(Optimizer):
    """Keeps uint8 codes in which 0 is not zero, as 8-bit optimisers do."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["codes"] = torch.full(parameter.shape, 127, dtype=torch.uint8)
            self.state[parameter]["moment"] = torch.ones_like(parameter)
            parameter.add_(1.0)


def test_an_optimizer_of_ones_own_is_masked_but_its_codes_are_left_alone() -> None:
    layer = masked(nn.Linear(32, 32))
    pruned = layer.weight == 0
    optimizer = CodedState(layer.parameters())
    optimizer.step()
    assert (layer.weight[pruned] == 0).all() and (layer.weight[~pruned] != 0).all()
    assert (optimizer.state[layer.weight]["moment"] == (~pruned).float()).all()
    assert (optimizer.state[layer.weight]["codes"] == 127).all()


def test_a_frozen_or_unused_weight_is_left_alone() -> None:
    model = masked(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    model[0].requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = copies(model)
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert illegal_groups(model[1].weight) == 0
