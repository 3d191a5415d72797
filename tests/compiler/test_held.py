"""A graph holds copies of what its model held; a change of the model is seen, and the layers answer then."""

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.turns import in_turn
from twofour.compiler.held import CHANGED, HOOKS, TRAINING, Held
from twofour.compiler.whole_model import all_hooks

from .small import quick

pytestmark = pytest.mark.usefixtures("no_measuring")


class Parts(nn.Module):
    """Two products of one input, which are joined, and weights that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.a, self.b = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(64))
        self.register_buffer("shift", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.relu(self.a(x)) + self.b(x) * self.scale + self.shift


def _more(tensor: Tensor) -> Tensor:
    return tensor.detach() + 3


CHANGES: dict[str, Callable[[Parts], object]] = {
    "a.bias": lambda model: model.a.bias.add_(3),
    "b.bias": lambda model: setattr(model.b, "bias", nn.Parameter(_more(model.b.bias))),
    "scale": lambda model: setattr(model, "scale", nn.Parameter(_more(model.scale))),
    "shift": lambda model: setattr(model, "shift", _more(model.shift)),
    "norm.weight": lambda model: model.load_state_dict({"norm.weight": torch.full((64,), 4.0)}, strict=False),
    "norm": lambda model: setattr(model, "norm", nn.Identity()),
    "norm.bias": lambda model: model.load_state_dict({"norm.bias": torch.ones(64)}, strict=False, assign=True),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_changed_model_answers_as_it_is_now(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = twofour.prune(Parts(), "2:4").eval(), torch.randn(8, 64)
    fast = quick(model, x, graph=True)
    served = fast(x)
    torch.testing.assert_close(served, model(x), rtol=1e-4, atol=1e-4)
    CHANGES[name](fast)
    CHANGES[name](model)
    with caplog.at_level(logging.WARNING, logger="twofour.compiler"):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(served, fast(x))
    said = [record.message for record in caplog.records if "after a change of" in record.message]
    assert len(said) == 1 and f"`{name}`" in said[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_a_copy_of_a_changed_model_answers_as_the_changed_one(copied: Callable[[nn.Module], nn.Module]) -> None:
    x = torch.randn(8, 64)
    fast = quick(twofour.prune(Parts(), "2:4").eval(), x, graph=True)
    before = fast(x)
    torch.testing.assert_close(copied(fast)(x), before)
    fast.a.bias.add_(3)
    changed = copied(fast)
    assert not torch.allclose(changed(x), before)
    torch.testing.assert_close(changed(x), fast(x))


def test_what_changed_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    held = Held(model)
    assert held.changed() == "" and Held(nn.ReLU()).changed() == ""
    with torch.no_grad():
        model[1].weight.zero_()
    assert held.changed() == "1.weight"
    model[0].bias = None
    assert held.changed() == "0.bias"
    assert Held(model).changed() == ""


def test_an_added_module_and_a_removed_one_are_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    held = Held(model)
    model.append(nn.ReLU())
    assert held.changed() == "1"
    held = Held(model)
    del model[0]
    assert held.changed() == "0"


def test_tensors_that_count_no_writes_are_held_too() -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 4)
    held = Held(model)
    assert held.changed() == ""
    model.bias = nn.Parameter(torch.ones(4))
    assert held.changed() == "bias"


LOOKS: dict[str, tuple[Callable[[Any], object], int]] = {
    "nothing": (lambda model: model[0].weight, 0),
    "a write": (lambda model: model[0].weight.detach().add_(1), CHANGED),
    "an assignment": (lambda model: setattr(model[0], "bias", nn.Parameter(torch.ones(4))), CHANGED),
    "an equal value in its place": (lambda model: setattr(model[0], "bias", nn.Parameter(model[0].bias)), CHANGED),
    "none in its place": (lambda model: setattr(model[0], "bias", None), CHANGED),
    "a removal": (lambda model: delattr(model[0], "bias"), CHANGED),
    "an addition": (lambda model: model[0].register_parameter("more", nn.Parameter(torch.ones(4))), CHANGED),
    "a module in its place": (lambda model: model.__setitem__(1, nn.ReLU()), CHANGED),
    "values exchanged": (lambda model: model.register_module("2", model._modules.pop("1")), CHANGED),
    "a mode": (lambda model: model[1].train(), TRAINING),
    "a mode and a hook": (lambda model: model[1].train().register_forward_hook(print), TRAINING | HOOKS),
    "a hook and a write": (lambda model: model[1].register_forward_pre_hook(print) and model[0].bias.zero_(), 6),
}


@in_turn("name", LOOKS)
@torch.no_grad()
def test_a_look_sees_what_the_names_say(name: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout()).eval()
    held = Held(model, all_hooks(model))
    assert held.look() == 0
    change, seen = LOOKS[name]
    change(model)
    assert held.look() == seen and held.look() == seen
    assert (bool(held.training()), bool(held.changed())) == (bool(seen & TRAINING), bool(seen & CHANGED))


def test_what_is_held_is_collected_with_its_model() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model[0].own = Held(model, all_hooks(model))  # a cycle
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
