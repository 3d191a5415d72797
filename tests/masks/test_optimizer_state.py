"""Which optimiser state is filled with zeros after a step, and that none is left unfilled that anybody wrote to."""

import copy
import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, RMSprop, Rprop

import twofour
from twofour import layers, masks
from twofour.masks import hooks, optimizer_state


def filled_by_a_step(optimizer: Optimizer, layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Take a step; return what was filled in it, beside the gradient and the parameter."""
    filled: list[Tensor] = []
    original = hooks.fill_pruned

    def fill(tensor: Tensor, keep: Tensor) -> None:
        filled.append(tensor)
        original(tensor, keep)

    layer.weight.grad = torch.randn_like(layer.weight)
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "fill_pruned", fill)
        optimizer.step()
    assert filled[0] is layer.weight.grad and filled[1] is layer.weight
    return filled[2:]


def stepped(make: Callable[..., Optimizer] = AdamW) -> tuple[nn.Linear, Tensor, Optimizer]:
    """A masked layer with pruned places and its optimiser, a step later."""
    layer = nn.Linear(32, 32)
    twofour.prune(layer, "2:4")
    optimizer = make(layer.parameters(), lr=0.1)
    layer.weight.grad = torch.randn_like(layer.weight)
    optimizer.step()
    return layer, layer.weight == 0, optimizer


def test_state_that_a_step_leaves_at_zero_is_not_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, pruned, optimizer = stepped()
    for _ in range(2):
        assert filled_by_a_step(optimizer, layer, monkeypatch) == []
    assert all((optimizer.state[layer.weight][key][pruned] == 0).all() for key in ("exp_avg", "exp_avg_sq"))


class Own(AdamW):
    """May do anything in its step."""


@pytest.mark.parametrize("make", [Own, Rprop, partial(RMSprop, momentum=0.9)])
def test_state_of_other_optimizers_is_filled_in_every_step(
    make: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _, optimizer = stepped(make)
    assert len(filled_by_a_step(optimizer, layer, monkeypatch)) == 2


def write_state(layer: nn.Linear, optimizer: Optimizer) -> None:
    optimizer.state[layer.weight]["exp_avg"].add_(1.0)


def load_state(layer: nn.Linear, optimizer: Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"].fill_(1.0)
    optimizer.load_state_dict(state)


def write_weight(layer: nn.Linear, optimizer: Optimizer) -> None:
    with torch.no_grad():
        layer.weight.add_(1.0)


def move_weight(layer: nn.Linear, optimizer: Optimizer) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


def write_mask(layer: nn.Linear, optimizer: Optimizer) -> None:
    (mask,) = masks.of(layer).values()
    mask.keep.logical_not_()


def other_mask(layer: nn.Linear, optimizer: Optimizer) -> None:
    (mask,) = masks.of(layer).values()
    (prunable,) = layers.walk(layer).weights
    masks.attach(prunable, ~mask.keep, mask.pattern)


def hook_before(layer: nn.Linear, optimizer: Optimizer) -> None:
    def hook(*_: object) -> None:
        assert layer.weight.grad is not None
        layer.weight.grad.add_(1.0)  # it runs after ours

    optimizer.register_step_pre_hook(hook)


def hook_after(layer: nn.Linear, optimizer: Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: write_state(layer, optimizer))


def mask_anew(layer: nn.Linear, optimizer: Optimizer) -> None:
    (prunable,) = layers.walk(layer).weights
    keep = ~masks.of(layer)["weight"].keep
    masks.detach(layer)
    masks.attach(prunable, keep, "2:4")


TOUCHES = [
    write_state,
    load_state,
    write_weight,
    move_weight,
    write_mask,
    other_mask,
    mask_anew,
    hook_before,
    hook_after,
]


@pytest.mark.parametrize("touch", TOUCHES)
def test_state_is_filled_after_somebody_wrote(
    touch: Callable[[nn.Linear, Optimizer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _, optimizer = stepped()
    touch(layer, optimizer)
    assert filled_by_a_step(optimizer, layer, monkeypatch)
    pruned = ~masks.of(layer)["weight"].keep
    assert all((optimizer.state[layer.weight][key][pruned] == 0).all() for key in ("exp_avg", "exp_avg_sq"))


def test_a_closure_may_write_state() -> None:
    layer, pruned, optimizer = stepped()

    def closure() -> Tensor:
        layer.weight.grad = torch.ones_like(layer.weight)
        write_state(layer, optimizer)
        return torch.zeros(())

    optimizer.step(closure)
    assert (optimizer.state[layer.weight]["exp_avg"][pruned] == 0).all()


def test_a_mask_made_in_inference_mode_trains() -> None:
    layer = nn.Linear(32, 32)
    with torch.inference_mode():
        twofour.prune(layer, "2:4")
    pruned = layer.weight == 0
    optimizer = AdamW(layer.parameters(), lr=0.1)
    for _ in range(2):
        layer.weight.grad = torch.randn_like(layer.weight)
        optimizer.step()
    assert (layer.weight[pruned] == 0).all() and (optimizer.state[layer.weight]["exp_avg"][pruned] == 0).all()


def test_a_stepped_parameter_can_be_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, pruned, _ = stepped()
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()})
    assert (layer.double().weight[pruned] == 0).all()


def test_what_is_known_of_state_goes_with_it() -> None:
    gc.collect()
    before = len(optimizer_state._filled)
    layer, _, optimizer = stepped()
    assert len(optimizer_state._filled) == before + 2
    del layer, optimizer
    gc.collect()
    assert len(optimizer_state._filled) == before
