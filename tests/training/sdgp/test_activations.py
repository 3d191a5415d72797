"""An activation's backward pass prunes what the layer before it would have pruned."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from tests.training.sdgp.small import attached
from tests.turns import in_turn
from twofour.layers import CARRIED
from twofour.training import sdgp
from twofour.training.sdgp import MODES


class OwnGELU(nn.GELU):
    """Not served: a class of the user's own."""


class OwnReLU(nn.ReLU):
    """The same."""


ACTIVATIONS = {
    "relu": (nn.ReLU, OwnReLU),
    "gelu_tanh": (lambda: nn.GELU("tanh"), lambda: OwnGELU("tanh")),
    "gelu": (nn.GELU, OwnGELU),
}


def pair(activation: str, **options) -> tuple[list[nn.Module], list[sdgp.Handle], Tensor]:
    """Two equal nets under the same rule: of the second no activation is served."""
    torch.manual_seed(0)
    ours, plain = ACTIVATIONS[activation]
    first = nn.Sequential(nn.Linear(16, 72), ours(), nn.Linear(72, 24), ours(), nn.Linear(24, 8))
    second = copy.deepcopy(first)
    second[1], second[3] = plain(), plain()
    return [first, second], [attached(model, seed=4, **options) for model in (first, second)], torch.randn(2, 9, 16)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    model(x).square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@in_turn("product", ["sparse", "dense"])
@in_turn("mode", MODES)
@in_turn("activation", ACTIVATIONS)
def test_an_activation_prunes_what_the_layer_would_have(
    every_size: None, activation: str, mode: str, product: str
) -> None:
    (first, second), handles, x = pair(activation, mode=mode, product=product)
    for _ in range(3):
        found, want = step(first, x), step(second, x)
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0 if activation == "relu" else 1e-6 * float(b.abs().max()))
    assert handles[0].state_dict() == handles[1].state_dict()
    made = [plan.pruned for plan in handles[0].plan.layers]
    assert made[:2] == [f"where {activation} made it"] * 2 and "no activation module" in made[2]
    assert f"pruned   where {activation} made it" in str(handles[0].plan)
    assert all("no activation module" in plan.pruned for plan in handles[1].plan.layers)
    handles[0].remove()
    assert type(first[1]) is type(ACTIVATIONS[activation][0]())


@pytest.mark.parametrize(
    ("activation", "mode"), [("relu", "rescaled"), ("relu", "unbiased"), ("gelu_tanh", "rescaled")]
)
def test_fifty_steps_have_the_losses_of_the_layers_own_pass(activation: str, mode: str) -> None:
    models, _, x = pair(activation, mode=mode, product="sparse")
    y, losses = torch.randn(2, 9, 8), []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses.append([])
        for _ in range(50):
            loss = (model(x.requires_grad_()) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    assert losses[0] == losses[1] if activation == "relu" else losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_other_uses_of_the_output_and_hooks_get_the_layers_own_pass(every_size: None) -> None:
    def through_data(g: Tensor) -> None:
        g.data.clamp_(-1e-3, 1e-3)

    def through_numpy(g: Tensor) -> None:
        g.numpy()[:] *= 2

    unseen = {"data": through_data, "numpy": through_numpy}

    def run(ours: bool, wiring: str) -> tuple[list[Tensor], str]:
        (first, second), handles, x = pair("relu", mode="unbiased", product="sparse")
        model, handle = (first, handles[0]) if ours else (second, handles[1])
        up, act, down = model[0], model[1], model[2]
        for _ in range(2):
            model.zero_grad()
            z = up(x := x.detach().requires_grad_())
            seen = [x]
            if wiring == "hook":
                z.register_hook(lambda g: 2 * g)
            if wiring == "in place":
                z.register_hook(lambda g: g.mul_(2))
            if wiring in ("data", "numpy"):
                z.register_hook(unseen[wiring])
            y = act(z)
            if wiring == "late":
                z.register_hook(unseen["data"])
            if wiring == "kept":
                y.retain_grad(), z.retain_grad()
                seen += [y, z]
            total = down(y).square().sum()
            if wiring == "sum":
                total = total + z.square().sum()
            if wiring == "twice":
                total = total + act(z).sum()
            del z
            total.backward()
        grads = [tensor.grad for tensor in (*seen, *up.parameters(), *down.parameters())]
        return grads, handle.plan.layers[0].pruned  # type: ignore[return-value]

    for wiring in ("kept", "hook", "in place", "data", "numpy", "late", "sum", "twice"):
        (found, where), (want, _) = run(True, wiring), run(False, wiring)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), wiring
        assert ("where relu made it" if wiring == "kept" else "a pass of its own") in where, wiring


@pytest.mark.parametrize("product", ["sparse", "dense"])
def test_what_no_layer_takes_is_gone_after_the_pass(every_size: None, product: str) -> None:
    torch.manual_seed(0)
    up, act, down = model = nn.Sequential(nn.Linear(16, 72), nn.GELU(), nn.Linear(72, 8))
    attached(model, product=product)
    workspace = up.__dict__[CARRIED].sources["data"].workspace
    for wanted in ("all", "z", "node"):
        z = up(torch.randn(3, 16, requires_grad=True))
        y = act(z)
        if wanted == "all":
            down(y).sum().backward()
        elif wanted == "z":
            torch.autograd.grad(down(y).sum(), z)
        else:  # a call of the node, outside of any pass
            y.grad_fn.apply(torch.ones_like(y))  # type: ignore[union-attr]
        assert workspace.take() is None, wanted


def test_another_layer_between_takes_the_buffer(every_size: None) -> None:
    def run(act: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(16, 32), act, nn.Linear(16, 32), nn.Linear(32, 8)])
        attached(model, mode="unbiased", product="sparse", seed=2)
        x = torch.randn(5, 16)
        for _ in range(2):
            model.zero_grad()
            y = model[1](model[0](x := x.detach().requires_grad_())) * model[2](x)
            model[3](y).square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    assert all(torch.equal(a, b) for a, b in zip(run(nn.ReLU()), run(OwnReLU()), strict=True))


def test_what_is_not_served_is_the_modules_own() -> None:
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 6), nn.ReLU()
    )
    handle = attached(model, product="sparse")
    assert type(model[1]) is nn.ReLU and type(model[3]) is not nn.GELU
    for x in (torch.randn(3, 16), torch.randn(3, 16).double(), torch.randn(3, 16, requires_grad=True)):
        model.to(x.dtype)(x).sum().backward()
    assert "where" not in handle.plan.layers[2].pruned  # six outputs
    z = model.float()[2](torch.randn(3, 32, requires_grad=True))
    (slope,) = torch.autograd.grad(model[3](z).sum(), z, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), z)
    at = z.detach().requires_grad_()
    (want,) = torch.autograd.grad(nn.functional.gelu(at).sum(), at, create_graph=True)
    torch.testing.assert_close(curvature, torch.autograd.grad(want.sum(), at)[0])
    with torch.no_grad():
        assert torch.equal(model[3](z), nn.functional.gelu(z))


@pytest.mark.parametrize(
    ("setting", "value", "make"),
    [("approximate", "tanh", nn.GELU), ("inplace", True, nn.ReLU), ("inplace", True, nn.SiLU)],
)
def test_settings_of_an_activation_are_read_at_each_call(
    every_size: None, setting: str, value: object, make: type[nn.Module]
) -> None:
    def run(own: bool) -> list[Tensor]:
        torch.manual_seed(0)
        act = type("Own", (make,), {})() if own else make()
        model = nn.Sequential(nn.Linear(16, 72), act, nn.Linear(72, 8))
        handle = attached(model, product="sparse", mode="magnitude")
        setattr(act, setting, value)
        found = [step(model, 2 * torch.ones(3, 16)) for _ in range(2)][1]
        assert own or setting == "inplace" or handle.plan.layers[0].pruned == "where gelu_tanh made it"
        handle.remove()
        assert own or type(act) is make
        return found

    for found, want in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-6 * float(want.abs().max()))


def test_copies_pickles_checkpoints_and_autocast() -> None:
    (model, _), _, x = pair("gelu", mode="rescaled", product="sparse")
    want = step(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other[1], nn.GELU) and type(other[1]) is type(model[1])
        assert all(torch.equal(a, b) for a, b in zip(step(other, x), want, strict=True))
    model.zero_grad()
    leaf = x.detach().requires_grad_()
    torch.utils.checkpoint.checkpoint(model, leaf, use_reentrant=False).square().mean().backward()
    torch.testing.assert_close(leaf.grad, want[0], rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        low = step(model, x)
    torch.testing.assert_close(low[0], want[0], rtol=0.2, atol=0.05 * float(want[0].abs().max()))


@pytest.mark.parametrize("kernel", [1, 3])
def test_convolutions_in_channels_last(every_size: None, kernel: int) -> None:
    def run(act: nn.Module) -> tuple[list[Tensor], str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 16, kernel, padding=kernel // 2), act, nn.Conv2d(16, 8, 1))
        handle = attached(model.to(memory_format=torch.channels_last), product="sparse")
        x = torch.randn(2, 8, 5, 6).contiguous(memory_format=torch.channels_last)
        return [step(model, x) for _ in range(2)][1], handle.plan.layers[0].pruned

    (found, where), (want, _) = run(nn.ReLU()), run(OwnReLU())
    assert where == "where relu made it"
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_activations_of_transformers_are_known() -> None:
    activations = pytest.importorskip("transformers.activations")
    for name, want in (
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("silu", "silu"),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 72), activations.ACT2FN[name], nn.Linear(72, 8))
        exact = step(copy.deepcopy(model), torch.ones(3, 16))
        handle = attached(model, product="sparse")
        found = [step(model, torch.ones(3, 16)) for _ in range(2)][1]
        assert handle.plan.layers[0].pruned == f"where {want} made it"
        torch.testing.assert_close(found[3:], exact[3:])
        torch.testing.assert_close(found[1:3], exact[1:3], rtol=0.5, atol=1.0)
