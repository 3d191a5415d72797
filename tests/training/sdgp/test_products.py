"""Sparse and dense products of pruned gradients: the same numbers, chosen by measuring, with the reason said."""

import copy
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import threads
from tests.training.sdgp.test_layers import chosen, gradients
from tests.turns import in_turn
from twofour.errors import TrainingError
from twofour.kernels.nm_gradient import packed_bytes
from twofour.layers import CARRIED
from twofour.training import sdgp
from twofour.training.sdgp import MODES
from twofour.training.sdgp.pruned_gradient import PrunedGradient
from twofour.training.sparse_linear import chooser

PRODUCTS = ("auto", "sparse", "dense")
LAYERS = {
    "linear": (lambda: nn.Linear(12, 24), (5, 12)),
    "linear, samples": (lambda: nn.Linear(20, 68, bias=False), (2, 3, 7, 20)),
    "1 x 1": (lambda: nn.Conv2d(6, 16, 1), (2, 6, 7, 5)),
    "3 x 3": (lambda: nn.Conv2d(6, 16, 3, padding=1), (2, 6, 7, 5)),
    "3 x 2, strided, dilated": (lambda: nn.Conv2d(6, 16, (3, 2), (2, 1), (1, 2), (1, 2)), (2, 6, 7, 5)),
    "5 x 1": (lambda: nn.Conv1d(6, 16, 5, 3, 4), (2, 6, 11)),
}
"""Convolutions all have 16 outputs."""


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small products too."""
    monkeypatch.setattr(chooser, "LEAST", 0)


def attached(layer: nn.Module, **options) -> sdgp.Handle:
    return sdgp.attach(layer, options.pop("pattern", "2:4"), seconds=1e-3, **options)


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    dz = torch.randn(layer(x).shape)
    if isinstance(layer, nn.Conv2d):
        x, dz = (t.contiguous(memory_format=torch.channels_last) for t in (x, dz))
    return layer, x, dz


def against_float64(layer: nn.Module, x: Tensor, dz: Tensor, left: Tensor) -> None:
    """Gradients of the layer: the input's that of `left`, the others that of dz."""
    dense = copy.deepcopy(layer)
    dense.__class__ = type(layer).__bases__[-1]
    dense = dense.double()
    dx, *others = gradients(layer, x, dz)
    last = x.ndim == 4 and not x.is_contiguous()
    assert dx.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    torch.testing.assert_close(dx, gradients(dense, x.double(), left.double())[0].float(), rtol=1e-4, atol=1e-5)
    for got, want in zip(others, gradients(dense, x.double(), dz.double())[1:], strict=True):
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)


@in_turn("name", LAYERS)
@in_turn("mode", MODES)
@in_turn("product", PRODUCTS)
def test_gradients_against_float64_with_the_same_mask(every_size: None, name: str, mode: str, product: str) -> None:
    layer, x, dz = case(name)
    handle = attached(layer, mode=mode, product=product, seed=3)
    against_float64(layer, x, dz, chosen(layer, dz))
    (plan,) = handle.plan.layers
    assert plan.choices["data"].sparse == (product == "sparse") or product == "auto"
    assert plan.tokens == dz.numel() // (16 if " x " in name else dz.shape[-1])


@in_turn("mode", MODES)
@in_turn("name", ["linear, samples", "3 x 2, strided, dilated"])
def test_every_instruction_set_multiplies_the_same_choice(isa: str, name: str, mode: str) -> None:
    layer, x, dz = case(name)
    attached(layer, mode=mode, product="sparse", seed=3)
    against_float64(layer, x, dz, chosen(layer, dz))


@given(
    inputs=st.integers(4, 70),
    outputs=st.integers(4, 140),
    samples=st.integers(1, 3),
    tokens=st.integers(1, 140),
    kernel=st.sampled_from((0, 1)),
    mode=st.sampled_from(MODES),
)
@settings(max_examples=40, deadline=None)
def test_odd_sizes(inputs: int, outputs: int, samples: int, tokens: int, kernel: int, mode: str) -> None:
    layer = nn.Conv2d(inputs, outputs, 1) if kernel else nn.Linear(inputs, outputs)
    x = torch.randn(samples, inputs, tokens, 2) if kernel else torch.randn(samples, tokens, inputs)
    dz = torch.randn_like(layer(x))
    if kernel:
        x, dz = (t.contiguous(memory_format=torch.channels_last) for t in (x, dz))
    handle = attached(layer, mode=mode, product="sparse")
    against_float64(layer, x, dz, chosen(layer, dz))
    assert handle.plan.layers[0].choices["data"].sparse == (outputs % 4 == 0) or kernel


@given(
    channels=st.tuples(st.integers(4, 36), st.integers(1, 18).map(lambda n: 4 * n)),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    taps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    samples=st.integers(1, 3),
    forms=st.tuples(st.booleans(), st.booleans(), st.sampled_from(("last", "contiguous", "sliced"))),
)
@settings(max_examples=30, deadline=None)
def test_geometries_of_convolutions(channels, size, taps, stride, padding, dilation, samples: int, forms) -> None:
    reach = [d * (k - 1) for d, k in zip(dilation, taps, strict=True)]
    assume(all(n + 2 * p > r for n, p, r in zip(size, padding, reach, strict=True)))
    assume(
        all(p <= r for p, r in zip(padding, reach, strict=True))
    )  # else torch's own forward pass may end the process
    layer = nn.Conv2d(*channels, taps, stride, padding, dilation)
    x = torch.randn(samples, channels[0], *size)
    dz = torch.randn_like(layer(x))
    last_x, last_weight, form = forms
    if last_x:
        x = x.contiguous(memory_format=torch.channels_last)
    if last_weight:
        layer = layer.to(memory_format=torch.channels_last)
    if form == "last":
        dz = dz.contiguous(memory_format=torch.channels_last)
    elif form == "sliced":
        dz = dz.repeat_interleave(2, dim=3)[:, :, :, ::2]
    handle = attached(layer, mode="magnitude", product="sparse")
    against_float64(layer, x, dz, chosen(layer, dz))
    assert handle.plan.layers[0].choices["data"].sparse


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_and_autocast_multiply_packed_bfloat16(mode: str) -> None:
    torch.manual_seed(0)
    layer, x, dz = nn.Linear(64, 96), torch.randn(2, 30, 64), torch.randn(2, 30, 96)
    handle = attached(layer, mode=mode, product="sparse")
    left = chosen(layer, dz.bfloat16()).double()
    want = left @ layer.weight.detach().bfloat16().double()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = gradients(layer, x, dz.bfloat16())[0]
    choice = handle.plan.layers[0]
    assert choice.dtype == "bfloat16" and "bf16_panels" in choice.choices["data"].kernel
    handle.load_state_dict({"": 0})
    whole = gradients(layer.bfloat16(), x.bfloat16(), dz.bfloat16())[0]
    for found in (mixed, whole.float()):
        torch.testing.assert_close(found.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", ["random", "unbiased"])
def test_a_seed_decides_whatever_the_product_and_the_threads(mode: str) -> None:
    layer, x, dz = case("linear, samples")

    def run(seed: int, product: str, count: int = 1) -> Tensor:
        own = copy.deepcopy(layer)
        attached(own, mode=mode, product=product, seed=seed)
        with threads(count):
            return torch.stack([gradients(own, x, dz)[0] for _ in range(2)])

    one, same = run(1, "sparse"), run(1, "sparse", 2)
    assert torch.equal(one, same) and not torch.equal(one[0], one[1])
    torch.testing.assert_close(one, run(1, "dense"), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(one, run(2, "sparse"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_gets_through_a_sparse_product(mode: str, bad: float) -> None:
    layer, x, dz = case("linear")
    attached(layer, mode=mode, product="sparse")
    dz[2, 5] = bad
    dx = gradients(layer, x, dz)[0]
    assert not dx[2].isfinite().any()
    assert mode == "rescaled" or dx[[0, 1, 3, 4]].isfinite().all()


def test_one_buffer_of_half_the_largest_gradient_serves_all_layers() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 512), nn.Linear(512, 64))
    attached(model, product="sparse")
    workspaces = [layer.__dict__[CARRIED].sources["data"].workspace for layer in model]
    model(torch.randn(384, 64, requires_grad=True)).sum().backward()
    buffers = {one.buffer(0).data_ptr(): one.buffer(0).nbytes for one in workspaces}
    assert list(buffers.values()) == [packed_bytes(384, 512, torch.float32)]
    assert packed_bytes(384, 512, torch.float32) < 0.54 * 384 * 512 * 4
    assert packed_bytes(384, 512, torch.bfloat16) < 0.58 * 384 * 512 * 2


def test_the_plan_says_what_runs_and_why(every_size: None) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 18), nn.Linear(18, 2))
    handle = attached(model)
    assert "0  32 x 16\n  data     - (chosen when its input first needs a gradient)" in str(handle.plan)
    model(torch.randn(9, 16, requires_grad=True)).sum().backward()
    first, second = handle.plan.layers
    assert (first.tokens, first.dtype, list(first.choices)) == (9, "float32", ["forward", "data", "weight"])
    data = first.choices["data"]
    assert data.dense_ms is not None and data.sparse_ms is not None and "times as" in data.reason
    assert second.choices["data"].reason == "18 output channels: a multiple of 4 is wanted"
    assert second.choices["data"].dense_ms is not None
    assert "2  dense: 2 output channels: no whole group of 4" in str(handle.plan)


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda: nn.Conv2d(8, 8, 3, groups=2), {}, "2 groups of channels: the kernels take one"),
        (lambda: nn.Conv2d(8, 10, 3), {}, "10 output channels: a multiple of 4 is wanted"),
        (lambda: nn.Conv2d(8, 8, 3).bfloat16(), {}, "no 2:4 kernel for a convolution in bfloat16 on cpu"),
        (lambda: nn.Conv2d(8, 8, 1), {"pattern": "1:4"}, "1:4: kernels read 2:4"),
        (lambda: nn.Conv2d(8, 8, 1), {"product": "dense"}, "asked for"),
        (lambda: nn.Conv2d(8, 8, 1).double(), {}, "float64: float32 or bfloat16 is wanted"),
    ],
)
def test_dense_products_have_a_reason(make, options, reason: str) -> None:
    layer = make()
    handle = attached(layer, **{"product": "sparse", **options})
    x = torch.randn(2, 8, 5, 5, dtype=layer.weight.dtype)
    gradients(layer, x, torch.randn_like(layer(x)))
    assert handle.plan.layers[0].choices["data"].reason == reason


def test_small_products_are_not_measured() -> None:
    layer, x, dz = case("linear")
    handle = sdgp.attach(layer, "2:4")
    gradients(layer, x, dz)
    reasons = {choice.reason for choice in handle.plan.layers[0].choices.values()}
    assert reasons == {"fewer than 4.2 million multiply-adds, not worth measuring"}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_size_is_chosen_once(every_size: None, monkeypatch: pytest.MonkeyPatch, name: str, product: str) -> None:
    layer, x, dz = case(name)
    handle = attached(layer, product=product)
    gradients(layer, x, dz)
    (plan,), asked = handle.plan.layers, []
    kernels = PrunedGradient.kernels
    monkeypatch.setattr(PrunedGradient, "kernels", lambda *args: asked.append(1) or kernels(*args))
    gradients(layer, x, dz)
    assert handle.plan.layers[0] is plan and not asked
    gradients(layer, x[:1], dz[:1])
    other = handle.plan.layers[0]
    assert asked and other.tokens < plan.tokens
    gradients(layer, x, dz)
    assert handle.plan.layers[0] == plan


def test_a_plan_is_of_the_type_that_ran_last(every_size: None) -> None:
    layer, x, dz = case("linear")
    handle = attached(layer)
    gradients(layer, x, dz)
    plan = handle.plan.layers[0]
    late = layer(x.requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert handle.plan.layers[0].dtype == "bfloat16"
    late.backward(dz)
    after = handle.plan.layers[0]
    assert after.dtype == "float32" and after.choices["data"] == plan.choices["data"]


def test_choices_stay_on_the_machine_that_measured_them(every_size: None) -> None:
    layer, x, dz = case("linear")
    attached(layer)
    want = gradients(layer, x, dz)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        products = other.__dict__[CARRIED]
        assert products.plan.choices == {} and products.chooser.known == {}
        torch.testing.assert_close(gradients(other, x, dz), want)


@pytest.mark.parametrize("name", ["linear", "1 x 1"])
def test_a_backward_pass_may_outlive_its_layer(name: str) -> None:
    layer, x, dz = case(name)
    attached(layer, product="sparse")
    x.requires_grad_()
    y = layer(x)
    del layer
    y.backward(dz)
    assert x.grad is not None and x.grad.isfinite().all()


def test_impossible_options_are_refused() -> None:
    for product, seconds in (("fast", 0.3), ("auto", 0.0)):
        with pytest.raises(TrainingError, match=r"an argument is impossible[\s\S]*'auto' or 'sparse' or 'dense'"):
            sdgp.attach(nn.Linear(8, 8), "2:4", product=product, seconds=seconds)


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
