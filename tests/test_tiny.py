"""The whole pipeline on a model of two layers, in seconds: the first test to run after any change (`make tiny`)."""

from pathlib import Path

import pytest
import torch
from torch import nn

import twofour


def test_the_whole_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path / "times"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    x = torch.randn(4, 64)

    dense = [parameter.detach().clone() for parameter in model.parameters()]
    twofour.prune(model, "2:4")
    zeros = [model[index].weight == 0 for index in (0, 2)]
    assert [float(zero.float().mean()) for zero in zeros] == [0.5, 0.5]

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(x).square().mean().backward()
    optimizer.step()
    for index, zero in zip((0, 2), zeros, strict=True):
        assert torch.equal(model[index].weight == 0, zero)
    assert not any(torch.equal(old, new) for old, new in zip(dense, model.parameters(), strict=True))

    report = twofour.check(model)
    assert report.ok and [layer.promised for layer in report.layers] == ["2:4", "2:4"]

    expected = model(x).detach()
    fast = twofour.compile(model, x, memory="small", tokens=(4,))
    assert len(fast.plan.layers) == 2
    torch.testing.assert_close(fast(x), expected, rtol=1e-5, atol=1e-5)

    twofour.save(fast, tmp_path / "tiny.safetensors")
    empty = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    loaded = twofour.load(tmp_path / "tiny.safetensors", empty)
    torch.testing.assert_close(loaded(x), fast(x), rtol=1e-5, atol=1e-5)
    assert twofour.check(loaded).ok
