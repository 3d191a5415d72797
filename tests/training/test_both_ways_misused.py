"""What users do around a model that is trained both ways: steps by hand, inputs that do not fit."""

import copy

import pytest
import torch
from torch import Tensor, nn

import twofour
from twofour.errors import TrainingError
from twofour.training import both_ways


def attached(state: str = "dense", **more) -> tuple[nn.Sequential, both_ways.BothWays, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    x = torch.randn(32, 64)
    return model, both_ways.attach(model, x, kernels="sparse", state=state, **more), x


def step_by_hand(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 10 * parameter.grad
            parameter.grad = None


@pytest.mark.parametrize("end", ["finish", "remove", "copy"])
@pytest.mark.parametrize("state", ["dense", "packed"])
def test_a_step_without_an_optimiser_leaves_the_answers(state, end):
    model, handle, x = attached(state)
    for _ in range(2):
        step_by_hand(model, x)
    want = model(x).detach()
    found = both_ways.finish(copy.deepcopy(model)) if end == "copy" else getattr(handle, end)()
    torch.testing.assert_close(found(x), want, rtol=1e-4, atol=1e-5)
    assert all((value == 0).sum() * 2 >= value.numel() for value in found.parameters() if value.ndim == 2)
    if end != "remove":
        assert twofour.check(found).ok


@pytest.mark.parametrize("state", ["dense", "packed"])
def test_inputs_that_the_dense_layer_refuses_are_refused(state):
    model, _, x = attached(state)
    with pytest.raises(TrainingError, match=r"(?s)layer `0`.*does not fit.*float32 \(3, 7\).*\(\.\.\., 64\)"):
        model(torch.randn(3, 7))
    with pytest.raises(TrainingError, match=r"(?s)does not fit.*bfloat16.*wanted\s+float32.*autocast"):
        model(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x.bfloat16()).dtype is torch.bfloat16
    assert model(x).dtype is torch.float32


def test_products_that_no_step_takes_are_not_counted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2].requires_grad_(False)
    handle = both_ways.attach(model, torch.randn(32, 64), seconds=0.01, eligibility="any")
    first, frozen, last = handle.plan.layers
    assert (first.idle, frozen.idle, last.idle) == (("data",), ("weight",), ())
    assert first.dense_ms == sum(first.choices[product].dense_ms or 0.0 for product in ("forward", "weight"))
    assert "of 7 products run 2:4" in handle.plan.summary
    assert "not run  data product" in str(handle.plan) and "not run  weight product" in str(handle.plan)
    wanting = torch.randn(32, 64, requires_grad=True)  # whoever wants it gets it all the same
    model(wanting).sum().backward()
    assert wanting.grad is not None
