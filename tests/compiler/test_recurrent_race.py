"""Recurrent layers are really raced against torch's own, in each form that their inputs have."""

import pytest
import torch
from torch import nn

import twofour
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
