"""The whole compiled model against the dense one: what ends slower has dense layers again, and says so."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twofour
from twofour.compiler import against_dense
from twofour.compiler.layer import CompiledLinear

from .small import TOKENS

pytestmark = pytest.mark.usefixtures("no_measuring")


class ReadsOne(nn.Module):
    """Calls one layer, and multiplies by the weight of the other without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.relu(self.called(x)), self.read.weight, self.read.bias)


def _compiled(monkeypatch: pytest.MonkeyPatch, times: list[tuple[float, float]], **options: object) -> nn.Module:
    """Compile while the whole models take these (dense, compiled) milliseconds one comparison after the other."""

    def answer(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        return dict(zip(("dense", "compiled"), times.pop(0), strict=True))

    monkeypatch.setattr(against_dense, "milliseconds", answer)
    monkeypatch.setattr(against_dense, "_seconds", _seconds)
    model = twofour.prune(ReadsOne(), "2:4")
    fast = twofour.compile(model, torch.randn(3, 64), tokens=TOKENS, **options)
    assert not times
    x = torch.randn(5, 64)
    torch.testing.assert_close(fast(x), model(x).detach())
    return fast


def _seconds(model: nn.Module, names: Mapping[str, object], call: Callable[[nn.Module], object]) -> dict[str, float]:
    call(model)
    return dict.fromkeys(names, 1.0)


def test_a_faster_model_keeps_its_layers_and_states_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = _compiled(monkeypatch, [(2.0, 1.0)], graph=False)
    assert isinstance(fast.called, CompiledLinear) and isinstance(fast.read, CompiledLinear)
    assert "one call on the example: dense 2.000 ms, compiled 1.000 ms" in str(fast.plan)


def test_a_layer_whose_weight_is_read_is_dense_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING, "twofour"):
        fast = _compiled(monkeypatch, [(1.0, 8.0), (1.0, 0.9)], graph=False)
    assert isinstance(fast.called, CompiledLinear) and type(fast.read) is nn.Linear
    entry = next(layer for layer in fast.plan.layers if layer.name == "read")
    assert (
        not entry.sparse
        and "dense 1.000 ms, compiled 8.000 ms" in entry.reason
        and "reading its weight" in entry.reason
    )
    assert "`read`: dense: the whole model is faster so" in caplog.text
    twofour.save(fast, tmp_path / "kept.safetensors")
    loaded = twofour.load(tmp_path / "kept.safetensors", ReadsOne(), tokens=TOKENS)
    assert type(loaded.read) is nn.Linear and isinstance(loaded.called, CompiledLinear)
    assert "where it was compiled" in next(layer for layer in loaded.plan.layers if layer.name == "read").reason


def test_a_layer_whose_call_is_slower_is_dense_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"called": 2.0}

    def seconds(model: nn.Module, names: Mapping[str, object], call: Callable[[nn.Module], object]) -> dict[str, float]:
        return {name: slow.get(name, 1.0) if isinstance(model.called, CompiledLinear) else 1.0 for name in names}

    monkeypatch.setitem(globals(), "_seconds", seconds)
    fast = _compiled(monkeypatch, [(1.0, 2.0), (1.0, 1.0)], graph=False)
    assert type(fast.called) is nn.Linear and isinstance(fast.read, CompiledLinear)


def test_all_layers_are_dense_again_where_none_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = _compiled(monkeypatch, [(1.0, 8.0), (1.0, 4.0), (1.0, 1.0)], graph=False)
    assert type(fast.called) is nn.Linear and type(fast.read) is nn.Linear
    assert fast.plan.kept_dense == ("read", "called") and not any(layer.sparse for layer in fast.plan.layers)


def test_a_slower_graph_goes_first(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fast = _compiled(monkeypatch, [(1.0, 2.0), (1.0, 0.9)])
    assert "forward" not in fast.__dict__ and isinstance(fast.called, CompiledLinear)
    assert "the dense model is faster than the graph" in fast.plan.account.reason
    assert not any("in the graph" in layer.reason for layer in fast.plan.layers)


def test_small_memory_is_not_traded_for_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = _compiled(monkeypatch, [], memory="small", graph=False)
    assert isinstance(fast.read, CompiledLinear) and not fast.plan.whole_ms


def test_real_calls_are_timed_layer_by_layer() -> None:
    model = ReadsOne()
    found = against_dense._seconds(model, {"called": None, "read": None}, lambda module: module(torch.randn(3, 64)))
    assert found["called"] > 0 and found["read"] == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
