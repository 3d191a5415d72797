"""Scales of groups and zero points: the formula in float64, exact sums, files, training, and what is refused."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import twofour
from tests.turns import in_turn
from twofour import export, masks, quantization
from twofour.errors import FormatError, QuantizationError


def made(weights: str, inputs: str | None, *, group: int | None = 16, symmetric: bool = True, **options) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 10), nn.ReLU(), nn.Linear(10, 4, bias=False)).eval()
    if options.pop("sparse", False):
        twofour.prune(model, {"0": "2:4", "*": "dense"}, eligibility="any")
    skip = () if group is None else ("2",)
    return twofour.quantize(model, weights, inputs, group=group, symmetric=symmetric, ends=None, skip=skip, **options)


KINDS = [("w1", "a2", 16, True), ("w1.58", "a8", 24, True), ("w4", None, 16, True), ("w4", "a8", 16, False)]
KINDS += [("b3", "s4", 48, True), ("w2", None, 8, False), ("w3", "a4", None, False)]


@in_turn(("weights", "inputs", "group", "symmetric"), KINDS)
def test_a_linear_is_its_formula_and_its_sums_are_exact(weights, inputs, group, symmetric) -> None:
    model, x = made(weights, inputs, group=group, symmetric=symmetric), torch.randn(2, 3, 48)
    layer, held = model[0], quantization.of(model)["0"]
    assert held.group == (group or 0) and held.shifted is not symmetric
    whole, scales = held.whole_weight(layer)
    each = quantization.carried.over(scales, whole)
    if held.shifted:
        codes = whole + quantization.carried.over(layer.weight_zero, whole)
        least, most = held.widths.weights.bounds
        assert (codes >= least).all() and (codes <= most).all()
        assert ((whole * each - layer.weight).abs() <= 0.51 * each).all()  # the range holds every weight
    real = whole.double() * each.double()
    levels, token = (x, torch.ones(1)) if inputs is None else held.input(layer, x)
    want = (levels.double() @ real.T) * token.double() + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), want, atol=1e-5, rtol=1e-5)
    if inputs is not None:
        x[0, 1, 5] = torch.nan
        with quantization.in_whole_numbers(model):
            exact = model(x)
        assert torch.equal(model(x).isnan(), exact.isnan()) and exact[0, 1].isnan().all() and exact[1].isfinite().all()
        assert torch.equal(model(x).nan_to_num(), exact.nan_to_num())


def test_groups_are_nearer_than_outputs() -> None:
    errors = []
    for group, symmetric in ((None, True), (16, True), (16, False)):
        model = made("w2", None, group=group, symmetric=symmetric)
        whole, scales = quantization.of(model)["0"].whole_weight(model[0])
        errors.append((whole * quantization.carried.over(scales, whole) - model[0].weight).norm().item())
    assert errors[1] < errors[0]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("weights", "inputs", "group", "symmetric"), KINDS)
def test_files_give_the_same_bits(tmp_path: Path, weights, inputs, group, symmetric, packed: bool) -> None:
    model, path, x = (
        made(weights, inputs, group=group, symmetric=symmetric),
        tmp_path / "m.safetensors",
        torch.randn(3, 48),
    )
    twofour.save(model, path, packed=packed)
    again = twofour.load(path, nn.Sequential(nn.Linear(48, 10), nn.ReLU(), nn.Linear(10, 4, bias=False)), masked=True)
    assert torch.equal(again.eval()(x), model(x)) and quantization.of(again) == quantization.of(model)
    assert twofour.check(path).ok
    if packed:
        found = export.read(path).packed["0.weight"]
        runs = 48 // (group or 48)
        assert found.header.group == (group or 0) and found.scales.shape == (10, runs)
        assert (found.zeros is not None) is not symmetric


def test_masks_keep_their_zeros_and_steps_are_learned(tmp_path: Path) -> None:
    for symmetric in (True, False):
        model, path = made("w4", "a8", symmetric=symmetric, sparse=True), tmp_path / "m.safetensors"
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        before = model[0].weight_step.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            model.train()(torch.randn(8, 48)).square().mean().backward()
            optimizer.step()
        assert not torch.equal(before, model[0].weight_step)
        whole, _ = quantization.of(model)["0"].whole_weight(model[0])
        assert (whole[~masks.of(model)["0.weight"].keep] == 0).all() and twofour.check(model).ok
        twofour.save(model.eval(), path)
        assert export.read(path).packed["0.weight"].header.pattern == ("2:4" if symmetric else "dense")
        again = twofour.load(
            path, nn.Sequential(nn.Linear(48, 10), nn.ReLU(), nn.Linear(10, 4, bias=False)), masked=True
        )
        x = torch.randn(3, 48)
        assert torch.equal(again.eval()(x), model(x)) and "0.weight" in masks.of(again)


def test_the_plan_says_which_groups_no_kernel_takes(times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    model, x = made("w4", "a8"), torch.randn(2, 48)
    fast = twofour.compile(model, x, tokens=(2,), graph=False)
    reason = next(layer.reason for layer in fast.plan.layers if layer.name == "0")
    assert "it takes groups of 32, 64, ... to 2048 inputs, the weight has groups of 16" in reason
    torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weights", ["w1", "w1.58"])
def test_means_of_groups_come_back_to_the_bit_where_no_graph_rounds_anew(
    tmp_path: Path, times_cache: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    model, x, path = made(weights, "a8"), torch.randn(3, 48), tmp_path / "m.safetensors"
    twofour.save(twofour.compile(model, x, tokens=(3,)), path)
    again = twofour.load(path, made(weights, "a8"), tokens=(3,), graph=False)
    for part in zip(*(quantization.of(one)["0"].whole_weight(one[0]) for one in (model, again)), strict=True):
        assert torch.equal(*part)
    assert torch.equal(again[0](x), model[0](x))  # by a graph only as near as float32: no kernel takes groups of 16
    torch.testing.assert_close(
        again(x), model(x), rtol=1e-5, atol=1e-6
    )  # the last Linear is of floats: any kernel serves


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(48, 10), nn.ReLU(), nn.Linear(10, 4))
    for options, remedy in (
        ({"group": 7}, "group=16"),
        ({"group": 16}, "group=2"),
        ({"group": 2, "scales": "tensor"}, 'scales="channel"'),
    ):
        with pytest.raises(QuantizationError, match=rf"cannot be cut into groups[\s\S]*try +{remedy}, or leave"):
            twofour.quantize(model, "w4", "a8", ends=None, **options)
    for weights in ("int4", 4, "4", " W4"):
        with pytest.raises(QuantizationError, match=r'try +weights="w4"'):
            twofour.quantize(model, weights)
    for weights in ("w1", "w1.58", "b3"):
        with pytest.raises(QuantizationError, match="no zero points"):
            twofour.quantize(model, weights, symmetric=False, ends=None)
    with pytest.raises(QuantizationError, match="`symmetric` is no truth value"):
        twofour.quantize(model, "w4", symmetric="no")
    with pytest.raises(QuantizationError, match="`group` cannot be used"):
        twofour.quantize(model, "w4", group=0)
    assert not quantization.of(model)
    low, path = made("w4", "a8", symmetric=False), tmp_path / "m.safetensors"
    low[0].weight_zero[0, 0] = 99
    with pytest.raises(QuantizationError, match="weight_zero"):
        twofour.save(low, path)
    twofour.save(made("w4", "a8"), path)
    with pytest.raises(FormatError, match="do not divide"):
        twofour.load(path, nn.Sequential(nn.Linear(40, 10), nn.ReLU(), nn.Linear(10, 4, bias=False)), masked=True)


class Largest(TorchDispatchMode):
    """Notes how many values the largest tensor has that is made."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.values = max(self.values, made.numel() if isinstance(made, torch.Tensor) else 0)
        return made


@pytest.mark.parametrize("mode", ["inference", "whole", "gradients", "training"])
def test_sums_of_all_groups_are_never_held_at_once(mode: str) -> None:
    layer = nn.Sequential(nn.Linear(64 * 2, 24))
    model, x = twofour.quantize(layer, "w4", "a8", group=2, ends=None), torch.randn(40, 128)
    model.train(mode == "training")
    whole = quantization.in_whole_numbers(model) if mode == "whole" else nullcontext()
    with Largest() as largest, whole, torch.set_grad_enabled(mode in ("gradients", "training")):
        kept = []
        with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            model(x)
    assert largest.values <= 128 * 40  # all 64 groups at once: 64 * 40 * 24
    assert sum(t.numel() for t in kept) <= 20 * 128 * 24


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_the_weight_that_the_whole_numbers_stand_for(training: bool) -> None:
    model, x = made("w4", "a8", symmetric=False).train(training)[0], torch.randn(5, 48, requires_grad=True)
    held = quantization.carried.held_by(model)
    assert held is not None
    (whole, scales), (levels, token) = held.weight(model), held.input(model, x)
    want = (levels @ (whole * quantization.carried.over(scales, whole)).T) * token + model.bias
    along = torch.randn(5, 10)
    steps = [x, model.weight, model.weight_step]
    for got, exact in zip(
        torch.autograd.grad(model(x), steps, along), torch.autograd.grad(want, steps, along), strict=True
    ):
        torch.testing.assert_close(got, exact, atol=1e-4, rtol=1e-4)
