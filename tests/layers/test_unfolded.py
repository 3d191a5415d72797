"""Each kind of layer, pruned, and its map from input to output written out by autograd: is it 2:4 along the input?

Nothing here knows where a layer stores what: only that every output sums over its inputs, and that of each 4
consecutive input channels at most 2 may count, at each pixel.
"""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.layers.small import ATTENTION, LAYERS, RECURRENT
from tests.turns import in_turn
from twofour import layers

ZEROS = torch.zeros(1, 16, dtype=torch.float64)


def jacobian(function, x: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(function, x.double())


def assert_two_of_four(rows: Tensor) -> None:
    """rows (anything, channels): at most 2 non-zeros in 4, and exactly 2 wherever there are any."""
    count = (rows.unflatten(-1, (-1, 4)) != 0).sum(-1)
    assert count.max() == 2 and set(count.unique().tolist()) <= {0, 2}, count.unique(return_counts=True)


@in_turn("kind", LAYERS)
def test_layers_that_are_one_linear_map(kind: str) -> None:
    make, shape, found = LAYERS[kind]
    layer = make().double()
    assert [weight.name for weight in layers.walk(layer, eligibility="asp").weights] == found
    twofour.prune(layer, "2:4")
    (weight,) = layers.walk(layer).weights
    assert weight.kind == kind
    unfolded = jacobian(layer, torch.randn(shape))
    outputs = unfolded.ndim - len(shape)
    assert_two_of_four(unfolded.movedim(outputs + (1 if len(shape) > 2 else len(shape) - 1), -1))
    # The rows of the weight are what an output sums over: so many values, as often as there are outputs and taps.
    assert weight.rows * weight.reduction == layer.weight.numel()
    assert 2 * int((layer.weight != 0).sum()) == layer.weight.numel()


@in_turn("kind", ["rnn", "gru", "lstm"])
@in_turn("cell", [False, True])
def test_gates_are_pruned_along_their_input(kind: str, cell: bool) -> None:
    base = RECURRENT[f"{kind}_cell" if cell else kind]
    layer = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[kind](16, 16) if not cell else base()
    twofour.prune(layer.double(), "2:4")
    gates = {"rnn": 1, "gru": 3, "lstm": 4}[kind]

    def step(alone: nn.Module, x: Tensor, h: Tensor) -> Tensor:
        state = (h, torch.ones_like(h)) if kind == "lstm" else h
        found = alone(x, state)
        if cell:
            return found[0] if kind == "lstm" else found
        return found[0]

    for gate in range(gates):
        for part in ("ih", "hh"):
            alone = copy.deepcopy(layer)
            twofour.masks.detach(alone)
            with torch.no_grad():
                for name, parameter in alone.named_parameters():
                    kept = parameter.view(gates, 16, -1)[gate].clone()
                    parameter.fill_(0.5 if "bias" in name else 0.0)  # away from the zeros of the gates
                    if f"weight_{part}" in name:
                        parameter.view(gates, 16, -1)[gate] = kept
            if part == "ih":
                rows = jacobian(partial(step, alone, h=ZEROS), ZEROS)
                assert_two_of_four(rows.squeeze())
            else:
                rows = jacobian(partial(step, alone, ZEROS), ZEROS).squeeze()
                rows = rows - torch.diag(rows.diag())  # GRU's own carry stands on the diagonal
                assert (rows.unflatten(-1, (-1, 4)) != 0).sum(-1).max() == 2


@pytest.mark.parametrize("form", ATTENTION)
def test_attention_projections_are_pruned_along_their_own_input(form: str) -> None:
    layer = ATTENTION[form]().double()
    twofour.prune(layer, "2:4")
    q, k, v = (torch.randn(1, 1, size) for size in (16, layer.kdim, layer.vdim))
    # One key: attention is 1, so the answer is out(value projection); q and k do not count.
    whole = jacobian(lambda value: layer(q.double(), k.double(), value)[0], v).squeeze()
    out = layer.out_proj.weight.detach()
    assert_two_of_four(torch.linalg.solve(out, whole).where(torch.linalg.solve(out, whole).abs() > 1e-9, 0))
    # Two keys that differ in one projected coordinate: the difference of logits shows one row of the query projection.
    logits = _logits(layer, k.double(), v.double())
    assert_two_of_four(logits)


def _logits(layer: nn.MultiheadAttention, k: Tensor, v: Tensor) -> Tensor:
    """The rows of the query projection, read off the attention weights."""
    twofour.masks.detach(layer)
    with torch.no_grad():
        key = layer.in_proj_weight[16:32] if layer.in_proj_weight is not None else layer.k_proj_weight
        key.copy_(torch.eye(16, key.shape[1]))
    rows = []
    for i in range(16):
        keys = torch.zeros(1, 2, k.shape[-1], dtype=torch.float64)
        keys[0, 0, i] = 1

        def difference(query: Tensor, keys: Tensor = keys) -> Tensor:
            weights = layer(query, keys, v.expand(1, 2, -1))[1]
            return (weights[..., 0] / weights[..., 1]).log()

        rows.append(jacobian(difference, torch.zeros(1, 1, 16)).squeeze())
    found = torch.stack(rows)
    return found.where(found.abs() > 1e-12, 0)
