"""Quantisation-aware training: the rounding of the packed weight, zeros that stay, what compile makes of it."""

import pytest
import torch
from torch import nn

import twofour
from twofour import masks, packing, quantization
from twofour.errors import MaskError, TrainingError


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    return twofour.prune(model, "2:4")


def train(model: nn.Module, count: int = 6) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 64, generator=generator), torch.randint(3, (32,), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"group": 32}, {"group": 32, "symmetric": False}])
def test_the_forward_pass_uses_what_the_packed_weight_will_hold(options):
    model, dtype = network(), "int4" if options else "int8"
    want = packing.pack(model[0].weight.detach(), "2:4", dtype=dtype, **options).unpack()
    scheme = quantization.attach(model, dtype, **options)
    torch.testing.assert_close(model[0].weight.detach(), want, atol=0, rtol=0)
    keep = model[0].parametrizations.weight[0].keep
    losses = train(model)
    assert losses[-1] < losses[0] and scheme.dtype == dtype
    used = model[0].weight.detach().clone()
    trained = model[0].parametrizations.weight.original.detach().clone()
    scheme.finish()
    assert (used[~keep] == 0).all() and (model[0].weight[~keep] == 0).all()
    assert torch.equal(model[0].weight, trained) and not torch.equal(trained, used)  # not rounded: training may go on
    assert twofour.check(model).ok and set(masks.of(model)) == {"0.weight", "2.weight"}
    packed = packing.pack(model[0].weight.detach(), "2:4", dtype=dtype, **options)
    torch.testing.assert_close(packed.unpack(), used, atol=1e-7, rtol=1e-6)  # what training used


def test_inputs_are_rounded_as_the_kernels_round_them():
    model = network()
    quantization.attach(model, "int8")
    x = torch.randn(5, 64)
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    step = (high - low) / 255
    rounded = ((x / step + (-low / step).round()).round().clamp(0, 255) - (-low / step).round()) * step
    want = nn.functional.linear(rounded, model[0].weight, model[0].bias)
    torch.testing.assert_close(model[0](x), want, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias), atol=1e-5)


def test_compiled_it_answers_as_it_was_trained(times_cache, monkeypatch):
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    model = network()
    scheme = quantization.attach(model, "int8")
    train(model)
    x = torch.randn(16, 64)
    with torch.no_grad():
        trained = model.eval()(x)
    fast = twofour.compile(scheme.finish(), x, dtype="int8", tokens=(16,))
    torch.testing.assert_close(fast(x), trained, atol=2e-2, rtol=2e-2)  # dense int8 layers have one range a call


def test_removed_it_leaves_what_the_optimiser_made_under_the_same_masks():
    model = network()
    before = {name: mask.keep.clone() for name, mask in masks.of(model).items()}
    keys = list(model.state_dict())
    scheme = quantization.attach(model, layers="2", activations=False)
    assert scheme.layers == ("2.weight",) and set(masks.of(model)) == {"0.weight"}
    train(model)
    scheme.remove()
    assert list(model.state_dict()) == keys and twofour.check(model).ok
    assert all(torch.equal(mask.keep, before[name]) for name, mask in masks.of(model).items())
    whole = model[2].weight / (model[2].weight.abs().amax(1, keepdim=True) / 127)
    assert (whole - whole.round()).abs().max() > 0.01  # the parameter was not rounded
    train(model)
    assert twofour.check(model).ok


def test_a_weight_replaced_meanwhile_is_noticed_or_masked():
    model = network()
    scheme = quantization.attach(model)
    with torch.no_grad():
        model[0].parametrizations.weight.original.fill_(1.0)
    scheme.finish()  # the rounding masks what it is given
    assert twofour.check(model).ok
    scheme = quantization.attach(model)
    model[0].parametrizations.weight[0].keep.fill_(True)
    with torch.no_grad():
        model[0].parametrizations.weight.original.fill_(1.0)
    with pytest.raises(MaskError, match="rounding broke the sparsity"):
        scheme.finish()
    assert twofour.check(scheme.remove()).ok and set(masks.of(model)) == {"0.weight", "2.weight"}


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(TrainingError, match="nothing to quantise"):
        quantization.attach(nn.Linear(64, 32))
    with pytest.raises(TrainingError, match="quantisation is impossible"):
        quantization.attach(network(), "int2")  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="quantisation is impossible"):
        quantization.attach(network(), "int4", group=48)
    convolution = twofour.prune(nn.Conv1d(16, 16, 3), "2:4")
    with pytest.raises(TrainingError, match="nothing to quantise"):
        quantization.attach(convolution)


def test_tied_weights_are_not_rounded():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    assert quantization.attach(twofour.prune(model, "2:4"), "int8").layers == ("2.weight",)


def test_an_input_given_by_name_is_rounded_too():
    model = twofour.prune(nn.Sequential(nn.Linear(64, 64)), "2:4")
    quantization.attach(model, "int8")
    x = torch.randn(3, 64)
    assert torch.equal(model[0](input=x), model[0](x))
