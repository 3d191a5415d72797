"""The rows of a layer times its matrix are the layer's output: the definition that every statistic rests on."""

import pytest
import torch
from torch import nn

import twofour
from tests.layers.small import Conv1D
from twofour.calibration import from_matrix, matrix
from twofour.calibration.inputs import CHUNK, groups, rows
from twofour.layers import walk

LAYERS = {
    "linear": (nn.Linear(6, 5), (3, 4, 6)),
    "vector": (nn.Linear(6, 5), (6,)),
    "conv1d": (nn.Conv1d(8, 6, 3, stride=2, padding=1, groups=2), (2, 8, 9)),
    "conv1d same": (nn.Conv1d(4, 6, 3, padding="same", dilation=2), (2, 4, 7)),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)), (2, 4, 9, 8)),
    "conv2d groups": (nn.Conv2d(12, 9, 3, groups=3, padding=1, padding_mode="reflect"), (2, 12, 5, 6)),
    "conv2d circular": (nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), (1, 4, 5, 5)),
    "unbatched": (nn.Conv2d(4, 3, 3), (4, 5, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_matrix_are_the_output(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, shape = LAYERS[name]
    layer = layer.double()
    (weight,) = walk(layer, eligibility="any").weights
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("twofour.calibration.inputs.CHUNK", 1)  # one sample at a time
    parts = list(rows(weight, (x,), {}, None))
    product = torch.cat(parts, dim=1) @ matrix(weight, weight.parameter.detach()).mT
    bias = layer.bias.view(groups(weight), 1, -1)
    with torch.no_grad():
        output = layer(x)
    if not isinstance(layer, nn.Linear):
        output = output.unsqueeze(0) if output.ndim == len(shape) and x.ndim == layer.weight.ndim - 1 else output
        output = output.movedim(1, -1)
    flat = output.reshape(-1, output.shape[-1]).unflatten(1, (groups(weight), -1)).movedim(1, 0)
    assert torch.allclose(product + bias, flat, rtol=1e-12, atol=1e-12)
    assert CHUNK > 1


@pytest.mark.parametrize("name", LAYERS)
def test_the_matrix_goes_back_to_the_weight(name: str) -> None:
    (weight,) = walk(LAYERS[name][0], eligibility="any").weights
    assert torch.equal(from_matrix(weight, matrix(weight, weight.parameter)), weight.parameter)


def test_padding_does_not_count() -> None:
    (weight,) = walk(nn.Linear(4, 4), eligibility="any").weights
    x, tokens = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    (found,) = rows(weight, (x,), {}, tokens)
    assert torch.equal(found[0], torch.stack([x[0, 0], x[0, 1], x[1, 0]]))
    (flat,) = rows(weight, (), {"input": x.view(6, 4)}, tokens)
    assert torch.equal(flat, found)
    (pooled,) = rows(weight, (x[:, 0],), {}, tokens)
    assert pooled.shape == (1, 2, 4), "an input of another shape counts as a whole"


def test_conv1d_of_hugging_face_sees_the_rows_of_a_linear() -> None:
    torch.manual_seed(0)
    stored, linear = Conv1D(8, 16), nn.Linear(16, 8)
    linear.load_state_dict({"weight": stored.weight.detach().t(), "bias": stored.bias.detach()})
    data = [torch.randn(4, 16) * torch.linspace(0.1, 3, 16) for _ in range(3)]
    for criterion in ("wanda", "sparsegpt"):
        pruned = [
            twofour.prune(nn.Sequential(each), "2:4", criterion=criterion, data=data) for each in (stored, linear)
        ]
        torch.testing.assert_close(pruned[0][0].weight.t(), pruned[1][0].weight)
