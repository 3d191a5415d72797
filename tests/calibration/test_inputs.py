"""The rows of a layer times its matrix are the layer's output: the definition that every statistic rests on."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import twofour
from tests.layers.small import Conv1D
from tests.turns import in_turn
from twofour.calibration import from_matrix, matrix
from twofour.calibration.inputs import CHUNK, caller, groups, rows
from twofour.layers import walk

LAYERS = {
    "linear": (nn.Linear(6, 5), (3, 4, 6)),
    "vector": (nn.Linear(6, 5), (6,)),
    "conv1d": (nn.Conv1d(8, 6, 3, stride=2, padding=1, groups=2), (2, 8, 9)),
    "conv1d same": (nn.Conv1d(4, 6, 3, padding="same", dilation=2), (2, 4, 7)),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)), (2, 4, 9, 8)),
    "conv2d groups": (nn.Conv2d(12, 9, 3, groups=3, padding=1, padding_mode="reflect"), (2, 12, 5, 6)),
    "conv2d circular": (nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), (1, 4, 5, 5)),
    "transposed": (nn.ConvTranspose2d(4, 6, (3, 2), stride=2, padding=(2, 1), output_padding=1), (2, 4, 5, 4)),
    "transposed groups": (nn.ConvTranspose1d(8, 6, 3, stride=3, dilation=2, groups=2), (2, 8, 5)),
    "transposed 3d": (nn.ConvTranspose3d(2, 3, 2, stride=(1, 2, 1)), (1, 2, 3, 2, 2)),
    "conv3d": (nn.Conv3d(2, 3, 2, padding=1), (1, 2, 3, 2, 2)),
    "hugging face": (Conv1D(5, 6), (3, 4, 6)),
    "unbatched": (nn.Conv2d(4, 3, 3), (4, 5, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_matrix_are_the_output(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, shape = LAYERS[name]
    layer = layer.double()
    (weight,) = walk(layer, eligibility="any").weights
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("twofour.calibration.inputs.CHUNK", 1)  # one sample at a time
    parts = list(rows(weight, layer, (x,), {}, None))
    product = torch.cat(parts, dim=1) @ matrix(weight, weight.parameter.detach()).mT
    bias = layer.bias.view(groups(weight), 1, -1)
    with torch.no_grad():
        output = layer(x)
    if not isinstance(layer, nn.Linear | Conv1D):
        output = output.unsqueeze(0) if output.ndim == len(shape) and x.ndim == layer.weight.ndim - 1 else output
        output = output.movedim(1, -1)
    flat = output.reshape(-1, output.shape[-1]).unflatten(1, (groups(weight), -1)).movedim(1, 0)
    assert torch.allclose(product + bias, flat, rtol=1e-12, atol=1e-12)
    assert CHUNK > 1


@in_turn("name", LAYERS)
def test_the_matrix_goes_back_to_the_weight(name: str) -> None:
    (weight,) = walk(LAYERS[name][0], eligibility="any").weights
    assert torch.equal(from_matrix(weight, matrix(weight, weight.parameter)), weight.parameter)


def test_padding_does_not_count() -> None:
    (weight,) = walk(nn.Linear(4, 4), eligibility="any").weights
    x, tokens = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    (found,) = rows(weight, weight.module, (x,), {}, tokens)
    assert torch.equal(found[0], torch.stack([x[0, 0], x[0, 1], x[1, 0]]))
    (flat,) = rows(weight, weight.module, (), {"input": x.view(6, 4)}, tokens)
    assert torch.equal(flat, found)
    (pooled,) = rows(weight, weight.module, (x[:, 0],), {}, tokens)
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


def observed(layer: nn.Module, args: tuple[Any, ...], **kwargs: Any) -> dict[str, torch.Tensor]:
    """Return the rows of every weight for one call."""
    with torch.no_grad():
        return {
            weight.name: torch.cat(list(rows(weight, caller(layer, weight), args, kwargs, None)), dim=1)
            for weight in walk(layer, eligibility="any").weights
        }


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention(batch_first: bool) -> None:
    attention = nn.MultiheadAttention(16, 4, kdim=12, vdim=20, batch_first=batch_first).double().eval()
    query, key, value = (torch.randn(2, n, w, dtype=torch.float64) for n, w in ((3, 16), (5, 12), (5, 20)))
    if not batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    found = observed(attention, (query,), key=key, value=value)
    output = attention(query, key, value)[0] if batch_first else attention(query, key, value)[0].transpose(0, 1)
    product = found["out_proj.weight"][0] @ attention.out_proj.weight.T + attention.out_proj.bias
    torch.testing.assert_close(product, output.reshape(-1, 16))
    for name, x in (("q", query), ("k", key), ("v", value)):
        want = (x if batch_first else x.transpose(0, 1)).reshape(-1, x.shape[-1])
        assert torch.equal(found[f"{name}_proj_weight"][0], want)


def test_fused_attention_has_three_inputs_and_short_ones_end_in_zeros() -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x, y = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    found = observed(attention, (x, y, y))["in_proj_weight"]
    assert found.shape == (3, 10, 16)
    assert torch.equal(found[0, :6], x.reshape(-1, 16)) and not found[0, 6:].any()
    assert torch.equal(found[1], y.reshape(-1, 16)) and torch.equal(found[2], found[1])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_recurrent_layers_step_by_step(packed: bool, batch_first: bool) -> None:
    """Each step's state follows from the rows found for it: h = tanh(W_ih x + b_ih + W_hh h' + b_hh)."""
    torch.manual_seed(0)
    layer = nn.RNN(6, 4, num_layers=2, bidirectional=True, batch_first=batch_first).double()
    x, lengths = torch.randn(3, 5, 6, dtype=torch.float64), torch.tensor([5, 2, 4])
    state = None if packed else torch.randn(4, 3, 4, dtype=torch.float64)
    given: Any = x if batch_first else x.transpose(0, 1)
    if packed:
        given = pack_padded_sequence(given, lengths, batch_first=batch_first, enforce_sorted=False)
    found = observed(layer, (given, state))
    output = layer(given, state)[0]
    if packed:
        output, _ = pad_packed_sequence(output, batch_first=batch_first)
    output = output if batch_first else output.transpose(0, 1)
    valid = (torch.arange(5) < lengths.unsqueeze(1)) if packed else torch.ones(3, 5, dtype=torch.bool)
    for number, suffix in enumerate(("l1", "l1_reverse")):
        weights = [getattr(layer, f"{name}_{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        inputs, hidden = found[f"weight_ih_{suffix}"][0], found[f"weight_hh_{suffix}"][0]
        state_after = torch.tanh(inputs @ weights[0].T + hidden @ weights[1].T + weights[2] + weights[3]).view(3, 5, 4)
        torch.testing.assert_close(state_after[valid], output[..., 4 * number : 4 * number + 4][valid])
        assert not hidden.view(3, 5, 4)[~valid].any() and not inputs.view(3, 5, 8)[~valid].any()


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_gated_layers_are_given_what_was_put_out(make: type[nn.RNNBase]) -> None:
    layer = make(6, 4, num_layers=2, batch_first=True)
    x = torch.randn(3, 5, 6)
    found = observed(layer, (x,))
    output = layer(x)[0]
    assert torch.equal(found["weight_ih_l0"][0], x.reshape(-1, 6))
    hidden = found["weight_hh_l1"].view(3, 5, 4)
    torch.testing.assert_close(hidden[:, 1:], output[:, :-1])
    assert not hidden[:, 0].any()


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(make: Any) -> None:
    cell, x, h = make(6, 4), torch.randn(3, 6), torch.randn(3, 4)
    found = observed(cell, (x,), hx=(h, h) if make is nn.LSTMCell else h)
    assert torch.equal(found["weight_ih"][0], x) and torch.equal(found["weight_hh"][0], h)
    assert not observed(cell, (x,))["weight_hh"].any()
