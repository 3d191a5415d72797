"""Recurrent layers are really raced in each form of their inputs: torch's own, packed weights and dense ones."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.test_recurrent import Speaking, assert_alike, compiled, racing, speaking
from twofour.measure import chooser


@pytest.mark.parametrize(
    ("kind", "options", "shape"),
    [
        (nn.LSTM, {"batch_first": True}, (2, 3, 8)),
        (nn.GRU, {"num_layers": 2}, (3, 2, 8)),
        (nn.LSTMCell, {}, (2, 8)),
        (nn.RNNCell, {"nonlinearity": "relu"}, (2, 8)),
    ],
)
def test_a_layer_is_raced_on_inputs_of_its_own_form(
    kind: type[nn.Module], options: dict[str, object], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", "off")
    monkeypatch.setattr("twofour.compiler.choose_recurrent.race", lambda calls, **_: chooser.race(calls, seconds=0.01))
    torch.manual_seed(0)
    model, x = nn.Sequential(kind(8, 16, **options)).eval(), torch.randn(shape)
    fast = twofour.compile(model, x, graph=False, tokens=(1,))
    (layer,) = fast.plan.layers
    assert layer.dense_ms is not None and layer.dense_ms > 0 and "torch" in layer.reason
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)


def test_weights_run_dense_where_ours_is_faster_so_and_the_plan_says_that(
    no_measuring: None, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    racing(monkeypatch, torch=2.0, native=1.5, dense=1.2)
    model, x = speaking(), torch.randn(3, 5, 16)
    fast = compiled(model, x)
    entry = next(entry for entry in fast.plan.layers if entry.name == "lstm")
    assert entry.kernel.startswith("dense_matmul") and (entry.dense_ms, entry.sparse_ms) == (1200.0, 1500.0)
    assert "0 of 4 weights sparse, 0.60x the time of torch's own" in entry.reason
    assert "dense: packed weights take 1.25x the time of dense ones of ours" in entry.reason
    assert_alike(fast(x), model(x))
    twofour.save(fast, tmp_path / "dense.safetensors")  # the pattern is kept all the same
    assert_alike(twofour.load(tmp_path / "dense.safetensors", Speaking())(x), model(x))
    assert isinstance(compiled(model, x, memory="small").plan.layers[0].sparse_ms, float)
    racing(monkeypatch, torch=2.0, native=1.0, dense=1.2)
    (entry,) = [entry for entry in compiled(model, x).plan.layers if entry.name == "lstm"]
    assert (entry.dense_ms, entry.sparse_ms) == (1200.0, 1000.0) and "; dense" not in entry.reason


@pytest.mark.parametrize("way", ["torch", "native", "dense"])
def test_the_plan_knows_what_a_recurrent_layer_takes_in_a_file(
    way: str, no_measuring: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    racing(monkeypatch, **{"torch": 2.0, "native": 2.0, "dense": 2.0, way: 1.0})
    for dtype, sparse, width in itertools.product(("float32", "bfloat16", "int8", "int4"), (False, True), (64, 40)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LSTM(width, 32)).eval()
        model = twofour.prune(model, "2:4", criterion="magnitude") if sparse and width == 64 else model
        fast = twofour.compile(model, torch.randn(3, 2, width), dtype, graph=False, tokens=(1,))
        twofour.save(fast, tmp_path / "m.safetensors")
        held = twofour.export.read(tmp_path / "m.safetensors")
        stored = sum(part.nbytes for name, part in {**held.plain, **held.packed}.items() if "weight" in name)
        (layer,) = fast.plan.layers
        assert layer.bytes_in_file == stored, (dtype, sparse, width)
