"""A clipped step is `clip_grad_norm_` and a step, to rounding."""

import copy

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from twofour import masks, prune
from twofour.errors import TrainingError
from twofour.training import both_ways, clipped_step


class Own(optim.AdamW):
    """A user's own class."""


OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, 1e-3, momentum=0.9, weight_decay=0.01, fused=True),
    "Adam": lambda p: optim.Adam(p, 1e-2, amsgrad=True, fused=True),
    "AdamW": lambda p: optim.AdamW(p, 1e-2, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, 1e-2, fused=True),
    "unfused": lambda p: optim.AdamW(p, 1e-2),
    "own": lambda p: Own(p, 1e-2, fused=True),
}


def model(kind: str) -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
    if kind == "masked":
        prune(net, "2:4")
    state = {"both ways": "dense", "packed": "packed"}.get(kind)
    return net, both_ways.attach(net, batch(0), kernels="sparse", state=state) if state is not None else None


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step))


def state_of(net: nn.Module, optimizer: optim.Optimizer) -> list[torch.Tensor]:
    held = [value for parameter in net.parameters() for value in optimizer.state[parameter].values()]
    return [*net.parameters(), *(parameter.grad for parameter in net.parameters()), *held]  # pyright: ignore


@pytest.mark.parametrize("kind", ["dense", "masked", "both ways", "packed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("norm", [0.05, 1e4])
def test_it_is_clipping_and_a_step(kind: str, name: str, norm: float) -> None:
    if kind == "packed" and name == "own":
        pytest.skip("not the optimiser's kind that kept values take without a trial")
    found = []
    for clipped in (True, False):
        net, handle = model(kind)
        optimizer = OPTIMIZERS[name](net.parameters())
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            net(batch(step)).square().sum().backward()
            if clipped:
                norms.append(clipped_step(optimizer, norm))
            else:
                masks.enforce(net)
                norms.append(nn.utils.clip_grad_norm_(net.parameters(), norm))
                optimizer.step()
        assert not hasattr(optimizer, "grad_scale") and (handle is not None) == (kind in ("both ways", "packed"))
        found.append([*norms, *state_of(net, optimizer)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


def test_gradients_that_are_not_finite_do_as_torch_does() -> None:
    for value in (float("nan"), float("inf")):
        found = []
        for clipped in (True, False):
            net, _ = model("dense")
            optimizer = OPTIMIZERS["AdamW"](net.parameters())
            net(batch(0)).sum().backward()
            first = next(net.parameters())
            assert first.grad is not None
            first.grad[0, 0] = value
            if clipped:
                clipped_step(optimizer, 1.0)
            else:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
            found.append(state_of(net, optimizer))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_gradients_that_the_optimiser_does_not_step_are_counted_and_clipped() -> None:
    found = []
    for clipped in (True, False):
        net, _ = model("dense")
        first, *others = net.parameters()
        optimizer = OPTIMIZERS["AdamW"](others)
        net(batch(0)).sum().backward()
        if clipped:
            norm = clipped_step(optimizer, 0.1, net.parameters())
        else:
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        found.append([norm, first, *(p.grad for p in net.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_one_tensor_is_clipped() -> None:
    for name in ("AdamW", "own"):
        net, _ = model("dense")
        first, *_ = net.parameters()
        optimizer = OPTIMIZERS[name]([first])
        net(batch(0)).sum().backward()
        clipped_step(optimizer, 0.1, first)
        assert first.grad is not None and first.grad.norm().item() == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("kind", ["dense", "masked"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_step_pre_hooks_of_a_user_see_clipped_gradients(kind: str, everywhere: bool) -> None:
    net, _ = model(kind)
    optimizer, seen = OPTIMIZERS["AdamW"](net.parameters()), []

    def look(one: optim.Optimizer, args: object, kwargs: object) -> None:
        seen.append(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]).item())

    hook = register_optimizer_step_pre_hook(look) if everywhere else optimizer.register_step_pre_hook(look)
    try:
        net(batch(0)).square().sum().backward()
        clipped_step(optimizer, 0.1)
    finally:
        hook.remove()
    assert seen == [pytest.approx(0.1, rel=1e-4)]


def test_hooks_of_our_own_leave_the_step_its_division(monkeypatch: pytest.MonkeyPatch) -> None:
    net, handle = model("both ways")
    optimizer = OPTIMIZERS["AdamW"](net.parameters())
    net(batch(0)).sum().backward()
    monkeypatch.delattr(nn.utils, "clip_grad_norm_")  # what the plain way calls
    clipped_step(optimizer, 0.1)
    assert handle is not None


def test_float64_is_clipped_in_float64() -> None:
    found = []
    for clipped in (True, False):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, dtype=torch.float64))
        weight.grad = torch.randn(64, dtype=torch.float64)
        optimizer = OPTIMIZERS["SGD"]([weight])
        if clipped:
            clipped_step(optimizer, np.float32(0.5))  # pyright: ignore[reportArgumentType]
        else:
            nn.utils.clip_grad_norm_(weight, 0.5)
            optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("norm", [0, -1.0, "1", float("nan")])
def test_impossible_norms_are_refused(norm: object) -> None:
    net, _ = model("dense")
    optimizer = copy.copy(OPTIMIZERS["SGD"](net.parameters()))
    with pytest.raises(TrainingError, match="`max_norm` is impossible"):
        clipped_step(optimizer, norm)  # pyright: ignore[reportArgumentType]
