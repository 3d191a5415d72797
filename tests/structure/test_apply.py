"""Changes of coupled axes keep what a model computes, move what stands beside a tensor, and are undone to the bit."""

import copy

import torch
from torch import nn

from twofour import capture, layers
from twofour.structure import AxisChanges, trace


def small() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16)).eval()
    nn.init.normal_(model[1].weight)  # pyright: ignore[reportArgumentType]
    return model, torch.randn(4, 16)


def test_apply_and_undo() -> None:
    model, x = small()
    before, state = model(x), copy.deepcopy(model.state_dict())
    weights = layers.walk(model, eligibility="any").weights
    beside = {"3.weight": model[3].weight.detach().clone()}  # pyright: ignore[reportIndexIssue]
    (group,) = trace(model, capture.arguments(model, (x,), {}), weights).groups
    changes, order = AxisChanges(model, beside), torch.arange(group.size).flip(0)
    changes.apply(group, order.expand(group.blocks, -1))
    assert torch.equal(model[1].weight, state["1.weight"].flip(0))  # pyright: ignore[reportIndexIssue]
    assert torch.equal(beside["3.weight"], state["3.weight"].flip(1))
    assert torch.allclose(model(x), before, atol=1e-5)

    copied = copy.deepcopy(model)
    changes.of_copy(copied).undo()
    assert torch.equal(copied(x), before) and not torch.equal(model.state_dict()["0.weight"], state["0.weight"])
    changes.undo()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    changes.undo()  # a second time nothing is left to undo
    assert torch.equal(model(x), before)
