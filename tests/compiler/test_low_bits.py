"""A model of low bits, compiled: its own answer, and a plan that says why each of its layers runs in floats."""

import pytest
import torch
from torch import nn

import twofour
from twofour import quantization


@pytest.mark.parametrize("graph", [False, "auto"])
@pytest.mark.parametrize("data", [False, True])
def test_it_answers_as_the_model_does_and_the_plan_says_why(times_cache, monkeypatch, graph, data: bool) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 5)
    ).eval()
    twofour.quantize(model, {"5": "float", "*": "w2"}, "a2", data=[x] if data else None)
    with quantization.in_whole_numbers(model):
        whole = model(x)
    fast = twofour.compile(model, x, tokens=(4,), graph=graph)
    torch.testing.assert_close(fast(x), whole, atol=1e-4, rtol=1e-4)
    reasons = {layer.name: layer.reason for layer in fast.plan.layers}  # type: ignore[union-attr]
    assert all(reasons[name].startswith("dense: w2a2: no kernel") for name in ("0", "3"))
    assert not reasons["5"].startswith("dense: w2")
    assert "w2a2" in str(fast.plan) and set(quantization.of(model)) == {"0", "3"}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_file_carries_weights_and_steps(times_cache, monkeypatch, tmp_path, compiled: bool, sparse: bool) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
        model = twofour.prune(model, "2:4") if sparse else model
        return twofour.quantize(model, "w4", "a8", data=[torch.randn(8, 32)])

    model, x = made(0), torch.randn(3, 32)
    twofour.save(twofour.compile(model, x, tokens=(3,)) if compiled else model, tmp_path / "low.safetensors")
    again = twofour.load(tmp_path / "low.safetensors", made(1), tokens=(3,))
    torch.testing.assert_close(again(x), model(x), atol=1e-5, rtol=1e-5)
    assert {held.widths.name for held in quantization.of(again).values()} == {"w4a8"}
