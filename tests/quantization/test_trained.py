"""Layers of low bits while they train: gradients by formula in float64, bfloat16 under autocast, layouts, pieces."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.turns import in_turn
from twofour import native, quantization
from twofour.errors import QuantizationError
from twofour.packing import encodings
from twofour.packing.encodings import Bits
from twofour.quantization import layer as layers
from twofour.quantization import trained

CASES = [("w1", "a2", True), ("w2", "a2", True), ("w8", "a8", True), ("w3", "b2", True), ("w1.58", "a8", False)]
CASES += [("w4", None, False), ("w2", "s4", False), ("w1", "a1", True)]
HALVES = pytest.mark.skipif(
    not any(map(native.supports, trained.HALVES)), reason="this CPU has no products of bfloat16: float32 is faster"
)


def layer_of(kind: str, weights: str, activations: str | None, learned: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "linear":
        layer, x = nn.Linear(48, 12), torch.randn(6, 5, 48)
    else:
        layer, x = nn.Conv2d(4, 12, 3, stride=2, padding=1, groups=2), torch.randn(5, 4, 9, 9)
        x = x.contiguous(memory_format=torch.channels_last if kind == "last" else torch.contiguous_format)
    twofour.quantize(layer, weights, activations, data=[x] if learned else None)
    return layer.train(), x


def gradients(layer: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    layer, x = copy.deepcopy(layer), x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(upstream.to(y.dtype).view(y.shape))
    found = {name: value.grad.double() for name, value in layer.named_parameters() if value.grad is not None}
    assert x.grad is not None and x.grad.dtype == x.dtype
    return {"y": y.detach().double(), "x": x.grad.double(), **found}


def straight(values: Tensor, rounded: Tensor, inside: Tensor) -> Tensor:
    """Rounded values whose gradient is one inside, as it is usually written."""
    return torch.where(inside, values + (rounded - values).detach(), rounded.detach())


def by_formula(layer: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """Return what `gradients` does, in float64 by the papers' formulas alone."""
    held = quantization.held_by(layer)
    assert held is not None
    w = layer.weight.detach().double().requires_grad_()  # type: ignore[union-attr, operator]
    bias = layer.bias.detach().double().requires_grad_()  # type: ignore[union-attr, operator]
    x = x.detach().double().requires_grad_()
    steps = {
        name: value.detach().double().requires_grad_() for name, value in layer.named_parameters() if "step" in name
    }
    across = (-1, *(1,) * (w.ndim - 1))
    rows, encoding = w.flatten(1), held.widths.weights
    if encoding.name == "b1":
        whole, scale = straight(w, torch.where(w < 0, -1.0, 1.0).double(), w.abs() <= 1), rows.abs().mean(1)
    elif encoding.levels == "ternary":
        scale = (rows.abs().sum(1) / (rows != 0).sum(1)).detach()
        whole = straight(w / scale.view(across), (w / scale.view(across)).round().clamp(-1, 1), torch.ones_like(w) > 0)
    else:
        least, most = encoding.bounds
        factor, scale = (rows.shape[1] * most) ** -0.5, steps["weight_step"]
        scale = scale * factor + (scale * (1 - factor)).detach()
        values = w / scale.view(across)
        whole = straight(values, values.round().clamp(least, most), (values >= least) & (values <= most))
    levels, token = x, torch.ones(())
    if held.static:
        least, most = held.widths.inputs.bounds  # type: ignore[union-attr]
        zero, count = float(layer.input_zero), x[0].numel() if x.ndim == 4 else x.shape[-1]  # type: ignore[arg-type]
        factor = (count * most) ** -0.5
        token = steps["input_step"] * factor + (steps["input_step"] * (1 - factor)).detach()
        values = x / token
        inside = (values >= least - zero) & (values <= most - zero)
        levels = straight(values, held.round()(values.float()).clamp(least - zero, most - zero).double(), inside)
    elif held.widths.inputs is not None:
        whole_levels, token = held.input(layer, x.detach().float())
        token = token.double()
        levels = straight(x / token, whole_levels.double(), torch.ones_like(x) > 0)
    if isinstance(layer, nn.Conv2d):
        sums = nn.functional.conv2d(levels, whole, None, layer.stride, layer.padding, layer.dilation, layer.groups)
        y = sums * (token * scale.view(-1, 1, 1)) + bias.view(-1, 1, 1)
    else:
        y = nn.functional.linear(levels, whole) * (token * scale) + bias
    y.backward(upstream.double().view(y.shape))
    leaves = {"x": x, "weight": w, "bias": bias, **steps}
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


@in_turn("kind", ["linear", "conv", "last"])
@in_turn(("weights", "activations", "learned"), CASES)
def test_gradients_are_those_of_the_formulas(kind: str, weights: str, activations: str | None, learned: bool) -> None:
    layer, x = layer_of(kind, weights, activations, learned)
    with torch.no_grad():
        for name, step in layer.named_parameters():
            step.mul_(0.7 if "step" in name else 1)  # so that more lie beyond the levels
        upstream = torch.randn(layer(x).shape)
    want, found = by_formula(layer, x, upstream), gradients(layer, x, upstream)
    assert want.keys() == found.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value.view(found[name].shape), rtol=2e-3, atol=2e-4, msg=name)
    if any(map(native.supports, trained.HALVES)):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype is torch.bfloat16
            half = gradients(layer, x, upstream)
        for name, value in want.items():
            error = (half[name] - value.view(half[name].shape)).norm() / value.norm()
            assert error < 0.03, f"{name}: {error}"


@HALVES
def test_autocast_does_not_train_on_the_weights_of_its_first_step() -> None:
    layer, x = layer_of("conv", "w2", "a2", True)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            before = layer(x)
            before.square().mean().backward()
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.add_(torch.randn_like(parameter).abs() / 10)
        again = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), again) and not torch.equal(before, again)


@HALVES
def test_other_types_and_cpus_without_bfloat16_multiply_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of("linear", "w2", "a2", True)
    want = layer(x)
    with torch.autocast("cpu", torch.float16):  # whose sums may be infinite
        assert torch.equal(layer(x), want)
    monkeypatch.setenv("TWOFOUR_ISA", "avx2")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), want)


def test_every_level_is_exact_in_bfloat16() -> None:
    values = torch.arange(-256.0, 257)
    assert torch.equal(values.bfloat16().float(), values)
    for name in [f"{kind}{bits}" for kind in "usb" for bits in range(1, 9)] + ["ternary", "ternary5"]:
        encoding = encodings.get(name)
        assert isinstance(encoding, Bits)
        least, most = encoding.bounds
        assert (most if encoding.levels == "bipolar" else most - least) <= 256  # less every zero point too


@pytest.mark.parametrize("kind", ["linear", "conv", "last"])
def test_pieces_make_no_difference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(kind, "w2", "a2", True)
    with torch.autocast("cpu", torch.bfloat16):
        upstream = torch.randn(layer(x).shape)
        want = gradients(layer, x, upstream)
        monkeypatch.setattr(trained, "HELD", 7)
        found = gradients(layer, x, upstream)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=0 if name != "input_step" else 1e-4)


@pytest.mark.parametrize("learned", [True, False])
def test_one_image_is_cut_as_a_batch_of_one(learned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of("conv", "w2", "a2", learned)
    monkeypatch.setattr(trained, "HELD", 60)
    with torch.autocast("cpu", torch.bfloat16):
        upstream = torch.randn(layer(x[:1]).shape)
        want, found = gradients(layer, x[:1], upstream), gradients(layer, x[0], upstream[0])
    for name, value in want.items():
        torch.testing.assert_close(found[name].view_as(value), value, rtol=1e-3, atol=1e-4, msg=name)


def test_images_of_one_channel_stay_in_channels_last() -> None:
    """A contiguous image of one channel lies as one in channels_last does, but for its strides."""
    conv = nn.Conv2d(1, 8, 3, padding=1)
    last = torch.rand(4, 8, 8, 1).permute(0, 3, 1, 2)
    assert conv(last).is_contiguous(memory_format=torch.channels_last)
    twofour.quantize(conv, "w2", "a2", data=[last])
    conv.train()
    assert conv(last).is_contiguous(memory_format=torch.channels_last)
    conv.eval()
    assert conv(last).is_contiguous()


def test_derivatives_of_gradients_are_refused_in_training_alone() -> None:
    layer, x = layer_of("linear", "w2", "a2", True)
    with pytest.raises(QuantizationError, match=r"no derivative(.|\n)*model\.eval\(\)"):
        torch.autograd.grad(layer(x).square().mean(), list(layer.parameters()), create_graph=True)
    layer.eval()
    (first,) = torch.autograd.grad(layer(x).square().mean(), layer.bias, create_graph=True)  # type: ignore[arg-type]
    assert torch.autograd.grad(first.square().sum(), layer.weight_step)[0].isfinite().all()  # type: ignore[arg-type]


def test_batches_of_gradients_are_refused_in_training_alone() -> None:
    layer, x = layer_of("linear", "w2", "a2", True)
    many = torch.randn(3, *layer(x).shape)
    with pytest.raises(QuantizationError, match=r"one at a time(.|\n)*a batch of gradients(.|\n)*model\.eval\(\)"):
        torch.autograd.grad(layer(x), layer.weight_step, many, is_grads_batched=True)  # type: ignore[arg-type]
    layer.eval()
    (found,) = torch.autograd.grad(layer(x), layer.weight_step, many, is_grads_batched=True)  # type: ignore[arg-type]
    (last,) = torch.autograd.grad(layer(x), layer.weight_step, many[2])  # type: ignore[arg-type]
    torch.testing.assert_close(found[2], last)


@pytest.mark.parametrize("weights", ["w1", "w2"])
def test_what_follows_operators_has_the_same_gradients(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of("conv", weights, "a2", True)
    upstream = torch.randn(layer(x).shape)
    want = gradients(layer, x, upstream)
    monkeypatch.setattr(layers, "_is_followed", lambda x: True)
    torch.testing.assert_close(gradients(layer, x, upstream), want, rtol=1e-4, atol=1e-5)


def test_signs_of_one_scale_and_of_rows_without_weights() -> None:
    """One scale is the mean of the whole weight; rows of zeros have the least scale, and gradients that are numbers."""
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 6), torch.randn(8, 24)
    layer.weight.data[2] = 0
    upstream = torch.randn(8, 6)
    for scales in ("channel", "tensor"):
        model = twofour.quantize(copy.deepcopy(layer), "w1", "a2", data=[x], scales=scales).train()  # type: ignore[arg-type]
        found = gradients(model, x, upstream)
        assert all(value.isfinite().all() for value in found.values())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layers, "_is_followed", lambda x: True)
            torch.testing.assert_close(found, gradients(model, x, upstream), rtol=1e-4, atol=1e-5)


def test_frozen_weights_leave_steps_their_gradients() -> None:
    layer, x = layer_of("conv", "w2", "a2", True)
    upstream = torch.randn(layer(x).shape)
    want = gradients(layer, x, upstream)
    layer.weight.requires_grad_(False)  # type: ignore[union-attr]
    found = gradients(layer, x, upstream)
    assert "weight" not in found
    torch.testing.assert_close(found, {name: value for name, value in want.items() if name != "weight"})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp's own
@in_turn("kind, training", [("linear", True), ("linear", False), ("last", True), ("last", False)])
def test_derivatives_past_the_rounding_are_for_backward_alone(kind, training):
    layer, x = layer_of(kind, "w2", "s4", learned=False)
    layer.train(training)
    ways = [lambda: torch.func.grad(lambda x: layer(x).sum())(x), lambda: torch.func.jvp(layer, (x,), (x,))]
    ways += [lambda: torch.no_grad()(torch.func.jvp)(layer, (x,), (x,))]
    ways += [lambda: torch.func.vmap(layer)(x)] if kind == "linear" else []
    for way in ways:
        with pytest.raises(QuantizationError, match=r"torch.func and forward mode do not[\s\S]*torch.autograd.grad"):
            way()
    if kind == "linear":
        with torch.no_grad():
            torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(QuantizationError, match="a tensor with a tangent"):
        layer(torch.autograd.forward_ad.make_dual(x, x))


COMPILED = """
import torch, twofour
torch.manual_seed(0)
for layer, x in ((torch.nn.Linear(48, 12), torch.randn(6, 48)), (torch.nn.Conv2d(4, 12, 3), torch.randn(5, 4, 9, 9))):
    twofour.quantize(layer, "w2", "s4")
    for training in (True, False):
        layer.train(training)
        answers, found = [], []
        for model in (layer, torch.compile(layer, backend="aot_eager")):
            given = x.clone().requires_grad_()
            answers.append(model(given))
            answers[-1].square().sum().backward()
            found.append(given.grad)
        torch.testing.assert_close(answers[1], answers[0])
        torch.testing.assert_close(found[1], found[0])
print("alike")
"""


@pytest.mark.long
def test_what_torch_compiles_has_the_same_answers_and_gradients():
    # In a process of its own: dynamo cannot follow the types that are checked in this one.
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "alike", done.stderr
