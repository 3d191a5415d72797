"""Convolutions of low bits, compiled: the bits of their whole numbers, or why no kernel runs."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from twofour import quantization
from twofour.kernels.bits_matmul.conv import bits_conv_rows
from twofour.kernels.dense_matmul import PLAIN


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path))


def of_bits(weights: str, inputs: str, *, data: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 33, 3, padding=1), nn.ReLU(), nn.Conv2d(33, 20, 3, 2, padding=(1, 0), bias=False)]
    model = nn.Sequential(*layers, nn.Conv2d(20, 6, 1, dilation=2)).eval()
    return twofour.quantize(model, weights, inputs, data=[torch.randn(4, 3, 9, 9)] if data else None, ends=None)


def whole(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with quantization.in_whole_numbers(model):
        return model(x)


def floats_last(calls: dict[str, Any], **_: Any) -> tuple[dict[str, float], bool]:
    """A race that kernels win."""
    return {name: 1.0 + (name == PLAIN.name) for name in calls}, True


def by_kernels(fast: nn.Module) -> bool:
    return all(held.runs is not None for held in quantization.of(fast).values())


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize(
    ("weights", "inputs"), [("w1", "a2"), ("w2", "a2"), ("w1.58", "a8"), ("b3", "s4"), ("w8", "b2")]
)
def test_kernels_give_the_bits_of_the_whole_numbers(weights: str, inputs: str, data: bool, monkeypatch) -> None:
    monkeypatch.setattr("twofour.compiler.low_bits_conv.race", floats_last)
    model, x = of_bits(weights, inputs, data=data), torch.randn(2, 3, 9, 9)
    fast = twofour.compile(model, x, graph=False)
    plan: Any = fast.plan
    assert by_kernels(fast) and plan.error == 0.0
    for layer in plan.layers:
        name = quantization.of(model)[layer.name].widths.name
        assert layer.kernel in {row.name for row in bits_conv_rows()} and layer.reason.startswith(f"{name} ")
    for shape in ((2, 3, 9, 9), (1, 3, 12, 7), (3, 9, 9)):
        x = 2 * torch.randn(shape)
        assert torch.equal(fast(x), whole(model, x))
        assert torch.equal(fast(x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x), whole(model, x))


def test_changed_weights_copies_and_other_inputs_are_served(monkeypatch) -> None:
    monkeypatch.setattr("twofour.compiler.low_bits_conv.race", floats_last)
    model, other, x = of_bits("w2", "a2"), of_bits("w2", "a2"), torch.randn(2, 3, 9, 9)
    fast = twofour.compile(model, x, graph=False)
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert by_kernels(again) and torch.equal(again(x), whole(model, x))
    with torch.no_grad():
        other[0].weight.mul_(-2)
        other[2].input_step.mul_(1.5)
    fast.load_state_dict(other.state_dict())
    assert torch.equal(fast(x), whole(other, x)) and not torch.equal(fast(x), whole(model, x))
    given = x.clone().requires_grad_()
    fast(given).sum().backward()
    assert given.grad is not None and given.grad.abs().sum() > 0
    x[1, 0, 4, 4] = float("nan")
    assert torch.equal(fast(x).nan_to_num(7.0), whole(other, x).nan_to_num(7.0)) and fast(x)[0].isfinite().all()


def test_what_no_kernel_takes_runs_in_floats_and_says_so() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")).eval()
    x = torch.randn(1, 4, 8, 8)
    twofour.quantize(model, "w2", "a2", data=[x], ends=None)
    fast = twofour.compile(model, x, graph=False)
    reasons = [layer.reason for layer in fast.plan.layers]  # type: ignore[union-attr]
    assert "not in 2 groups" in reasons[0] and "padding_mode 'circular'" in reasons[1]
    assert torch.equal(fast(x), model(x))
