"""A small network trained with 2:4 weights both ways, one step of it, and what it is held to."""

import torch
from torch import nn

from twofour import patterns
from twofour.training import both_ways

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
