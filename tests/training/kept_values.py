"""A small network trained by its kept values alone, and the same one by the dense weight under its mask."""

import torch
from torch import nn

from twofour import masks
from twofour.patterns import Transposable
from twofour.training import both_ways

PATTERN = Transposable()

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.05, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-2, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 1e-3, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 1e-2, initial_accumulator_value=0.1),
}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48, bias=False), nn.GELU(), nn.Linear(48, 7))


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(24, 32, generator=torch.Generator().manual_seed(seed))


def attach(model: nn.Module, state: str = "packed", **options) -> both_ways.BothWays:
    return both_ways.attach(model, batch(), **{"kernels": "sparse", "state": state, **options})


def losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int, clip: float = 0.0
) -> list[float]:
    found = []
    for step in range(first, first + count):
        optimizer.zero_grad()
        loss = (model(batch(step)) - batch(step)[:, :7].sin()).square().mean()
        loss.backward()
        if clip:
            masks.enforce(model)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def pair(**options) -> tuple[nn.Module, nn.Module]:
    models = network(), network()
    for model, state in zip(models, ("dense", "packed"), strict=True):
        model.handle = [attach(model, state, **options)]  # a list: no module, no parameter
    return models


def assert_same(one: nn.Module, other: nn.Module, limit: float = 0.0) -> None:
    states = one.state_dict(), other.state_dict()
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        assert value.shape == states[1][name].shape
        error = (value - states[1][name]).norm() / value.norm()
        assert error <= limit, (name, float(error))
