"""Masks under torch.compile: the hooks stay outside the graphs, and the step is compiled once."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch._dynamo as dynamo
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from twofour import layers, masks
from twofour.patterns import NM

# Both come from inside torch 2.13's compiler, which means to hide the second but cannot where warnings are errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.05),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "adamw-capturable": partial(AdamW, lr=0.01, weight_decay=0.1, capturable=True),
    "adamw-capturable-foreach": partial(AdamW, lr=0.01, weight_decay=0.1, capturable=True, foreach=True),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


def mask(model: nn.Module) -> dict[str, Tensor]:
    for weight in layers.walk(model).weights:
        masks.attach(weight, NM(2, 4).project(weight.parameter.detach(), absolute=True), "2:4")
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.ndim == 2}


def training_step(model: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def assert_sparse(model: nn.Module, before: dict[str, Tensor], optimizer: Optimizer) -> None:
    for name, weight in model.named_parameters():
        if name in before:
            pruned = before[name] == 0
            assert (weight[pruned] == 0).all() and pruned.float().mean() == 0.5
            assert (weight[~pruned] != before[name][~pruned]).float().mean() > 0.9
            states = [state for state in optimizer.state[weight].values() if state.shape == weight.shape]
            assert states and all((state[pruned] == 0).all() for state in states)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    dynamo.reset()
    dynamo.utils.counters.clear()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_the_whole_training_step(make: Callable[..., Optimizer]) -> None:
    torch.manual_seed(0)
    model = network()
    before = mask(model)
    optimizer = make(model.parameters())
    step = torch.compile(training_step(model, optimizer), backend="aot_eager")
    for index in range(50):
        step(torch.randn(8, 32))
        if index == 10:
            graphs = dynamo.utils.counters["stats"]["unique_graphs"]
    assert dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "the step was compiled again while it ran"
    assert_sparse(model, before, optimizer)


@pytest.mark.parametrize("name", ["sgd", "adamw-capturable-foreach"])
def test_the_optimizer_step_alone(name: str) -> None:
    torch.manual_seed(0)
    model = network()
    before = mask(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(20):
        optimizer.zero_grad()
        batch = torch.randn(8, 32)
        (model(batch) - batch).square().mean().backward()
        step()
    assert_sparse(model, before, optimizer)


@pytest.mark.long
def test_a_step_compiled_to_code() -> None:
    torch.manual_seed(0)
    model = network()
    before = mask(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = torch.compile(training_step(model, optimizer))
    for _ in range(10):
        step(torch.randn(8, 32))
    assert_sparse(model, before, optimizer)


def test_a_step_compiled_before_the_model_was_masked() -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = torch.compile(training_step(model, optimizer), backend="aot_eager")
    step(torch.randn(8, 32))
    before = mask(model)
    for _ in range(10):
        step(torch.randn(8, 32))
    assert_sparse(model, before, optimizer)


def test_a_copy_that_only_ever_ran_compiled() -> None:
    torch.manual_seed(0)
    model = network()
    before = mask(model)
    other = copy.deepcopy(model)
    optimizer = OPTIMIZERS["adamw"](other.parameters())
    step = torch.compile(training_step(other, optimizer), backend="aot_eager")
    for _ in range(10):
        step(torch.randn(8, 32))
    assert_sparse(other, before, optimizer)


def test_many_models_do_not_reach_the_recompile_limit() -> None:
    torch.manual_seed(0)
    model = network()
    before = mask(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = torch.compile(training_step(model, optimizer), backend="aot_eager")
    others = []
    for _ in range(2 * dynamo.config.recompile_limit):
        others.append(network())
        mask(others[-1])
        step(torch.randn(8, 32))
    assert_sparse(model, before, optimizer)
    assert dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_a_compiled_forward_with_an_eager_step() -> None:
    torch.manual_seed(0)
    model = network()
    before = mask(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = training_step(torch.compile(model, backend="aot_eager", fullgraph=True), optimizer)
    for _ in range(10):
        step(torch.randn(8, 32))
    assert_sparse(model, before, optimizer)
