"""estimate(..., training=True): three products a layer, passes by bytes, and what may be sparse in them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import twofour
from twofour.errors import HardwareError
from twofour.hardware import MACHINES, VARIANTS, TrainingEstimate, gemm
from twofour.hardware.fitted import FITTED
from twofour.hardware.machine import stored_bytes
from twofour.hardware.step_shapes import trace_step


class Net(nn.Module):
    """Strided, grouped, depthwise and 1 x 1 convolutions, a batch norm, attention, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.point = nn.Conv2d(16, 32, 1, stride=2)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.deep = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.fc = nn.Linear(32, 64)
        self.odd = nn.Linear(64, 6)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = self.deep(self.grouped(self.point(x))).flatten(2).transpose(1, 2)
        x = self.fc(x)
        return self.odd(F.scaled_dot_product_attention(x, x, x))


X = torch.randn(4, 3, 16, 16)


def step(model: nn.Module, x, machine: str = "a100-sxm", **options) -> TrainingEstimate:
    found = twofour.estimate(model, x, machine=machine, training=True, **options)
    assert isinstance(found, TrainingEstimate)
    return found


def test_the_forward_pass_is_the_inference_estimate():
    model = Net()
    inferred, trained = twofour.estimate(model, X, machine="h100-pcie"), step(model, X, "h100-pcie")
    forward = [row for row in trained.rows if row.product == "forward"]
    assert len(forward) == len(inferred.rows) == 8
    for row, other in zip(forward, inferred.rows, strict=True):
        assert (row.layer, row.m, row.n, row.k, row.batch) == (other.layer, other.m, other.n, other.k, other.batch)
        assert (row.dense_ms, row.bound) == (other.dense_ms, other.bound)
        way = row.way("W")
        assert (way and way.ms) == other.sparse_ms and (way is None or way.bound == other.sparse_bound)


def test_the_products_are_those_that_torch_counts():
    class Plain(Net):
        def forward(self, x):  # torch counts the weight gradient of groups as if there were none
            x = F.relu(self.norm(self.stem(x)))
            return self.odd(self.fc(self.point(x).flatten(2).transpose(1, 2)))

    model, counter = Plain(), FlopCounterMode(display=False)
    with counter:
        model(X).sum().backward()
    rows = step(model, X).rows
    assert sum(2 * row.m * row.n * row.k * row.batch for row in rows) == counter.get_total_flops()
    assert sorted(row.product for row in rows if row.layer == "stem") == ["forward", "weight gradient"]


def test_parts_sum_to_the_step_and_shares_to_one():
    result = step(Net(), X, optimizer="sgd")
    assert sum(result.parts.values()) == pytest.approx(result.dense_ms) and sum(
        result.shares.values()
    ) == pytest.approx(1)
    assert set(result.parts) == {
        *("forward", "input gradient", "weight gradient", "attention", "norms", "elementwise", "optimiser")
    }
    assert all(ms > 0 for ms in result.parts.values())
    products = [row for row in result.rows if row.layer == "(activations)"]
    assert len(products) == 6 and all(row.sparse[0].reason == "no weight" for row in products)
    content = json.loads(json.dumps(result.to_dict()))
    assert content["parts_ms"] == result.parts and {row["name"] for row in content["variants"]} == set(VARIANTS)
    assert "not priced: the loss" in str(result) and "by the paper's arithmetic" in str(result)


def test_passes_are_bytes_over_bandwidth():
    channels, places = 8, 2 * 6 * 6
    model = nn.Sequential(nn.Conv2d(3, channels, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
    traced = trace_step(model, torch.randn(2, 3, 8, 8))
    values = places * channels
    vectors = 10 * channels  # statistics and gradients of a channel
    assert traced.norms == (2 + 1) * values + (2 * 2 + 1) * values + vectors  # x twice, y; x and dy twice, dx
    assert traced.elementwise == 2 * values + 3 * values  # relu: x, y; dy, y, dx
    machine = MACHINES["h200"]
    rate = machine.bandwidth * FITTED.memory / 1e3
    result = step(model, torch.randn(2, 3, 8, 8), "h200", optimizer="sgd")
    assert result.norms_ms == pytest.approx(2 * traced.norms / rate)
    weights, trained = 27 * channels, 29 * channels
    assert result.optimizer_ms == pytest.approx((20 * trained + 2 * 6 * weights) / rate)
    assert step(model, torch.randn(2, 3, 8, 8), "h200", dtype="tf32").optimizer_ms == pytest.approx(28 * trained / rate)


def test_choosing_and_packing_is_counted_and_a_variant_adds_up():
    tokens, width = 8192, 4096
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
    result = step(model, torch.randn(tokens, width), "a100-sxm")
    machine = MACHINES["a100-sxm"]
    rate, launch = machine.bandwidth * FITTED.memory / 1e3, FITTED.launch_of(machine) * 1e3
    packed = stored_bytes("bfloat16", sparse=True)
    row = next(row for row in result.rows if row.layer == "1" and row.product == "input gradient")
    weight, gradient = row.way("W"), row.way("dZ")
    assert weight is not None and gradient is not None and weight.ms and gradient.ms
    assert weight.pass_ms == pytest.approx(launch + width**2 * (4 + packed) / rate)
    assert gradient.pass_ms == pytest.approx(2 * launch + tokens * width * (2 + 2 + packed) / rate)
    assert gradient.ms == pytest.approx(gemm("a100-sxm", "bfloat16", m=width, n=tokens, k=width, sparse=True) * 1e3)
    sdgp = result.variant("sdgp")
    assert sdgp.taken == (("1", "input gradient"),) and sdgp.fits == 1  # the first layer's input needs no gradient
    assert sdgp.best_ms == pytest.approx(result.dense_ms - row.dense_ms + gradient.ms + gradient.pass_ms)
    assert sdgp.pass_ms == gradient.pass_ms and sdgp.saved == pytest.approx(1 - sdgp.best_ms / result.dense_ms)
    assert result.paper_saved == pytest.approx(row.dense_ms / 2 / result.dense_ms)
    both = result.variant("both ways")
    assert both.pass_ms == pytest.approx(
        3 * weight.pass_ms + 2 * 18 * width**2 / rate
    )  # packed thrice, kept zero twice
    assert result.variant("all three").best_ms < both.best_ms < result.dense_ms


@settings(max_examples=15, deadline=None)
@given(
    inputs=st.integers(1, 12),
    outputs=st.integers(1, 12),
    taps=st.sampled_from((1, 2, 3)),
    groups=st.sampled_from((1, 2)),
    batch=st.integers(1, 3),
)
def test_nothing_sparse_is_priced_where_the_pattern_does_not_fit(inputs, outputs, taps, groups, batch):
    first = nn.Conv2d(3, inputs * groups, 1)
    model = nn.Sequential(first, nn.Conv2d(inputs * groups, outputs * groups, taps, groups=groups))
    result = step(model, torch.randn(batch, 3, 5, 5), skip="0")
    rows = {row.product: row for row in result.rows if row.layer == "1"}
    places = batch * (6 - taps) ** 2
    assert len(rows) == 3
    if inputs % 4:
        assert rows["forward"].way("W") is None
    if inputs % 4 or outputs % 4:
        assert rows["input gradient"].way("W") is None
    if outputs % 4 or inputs * groups <= 3:
        assert rows["input gradient"].way("dZ") is None
    if places % 4:
        assert rows["weight gradient"].way("dZ") is None
    for row in result.rows:
        for way in row.sparse:
            assert bool(way.reason) == (way.ms is None) and (way.ms is None or (way.ms > 0 and way.pass_ms > 0))
    assert all(layer == "1" for variant in result.variants for layer, _ in variant.taken)


def test_depthwise_and_frozen_layers():
    result = step(Net(), X)
    rows = [row for row in result.rows if row.layer == "deep"]
    assert len(rows) == 3 and {row.bound for row in rows} == {"memory"}
    assert all("depthwise" in way.reason and way.ms is None for row in rows for way in row.sparse)
    assert any("depthwise" in note for note in result.notes)
    model = Net()
    model.fc.weight.requires_grad_(False)
    frozen = {(row.layer, row.product) for row in step(model, X).rows}
    assert ("fc", "weight gradient") not in frozen and ("fc", "input gradient") in frozen


def test_a_weight_used_twice_is_packed_once_and_a_dropout_is_one_pass():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.fc(F.dropout(self.fc(x), 0.1, self.training))

    once, twice = step(nn.Linear(64, 64, bias=False), torch.randn(32, 64)), step(Twice(), torch.randn(32, 64))
    forward = [row.way("W") for row in twice.rows if row.product == "forward"]
    alone = once.rows[0].way("W")
    assert alone is not None and sum(way.pass_ms for way in forward if way) == pytest.approx(alone.pass_ms)
    traced = trace_step(Twice(), torch.randn(32, 64))
    assert traced.elementwise == 32 * 64 * (2 + 3) + 3 * 64 * 64  # x, y; x, dy, dx; the weight's two gradients summed


class Tied(nn.Module):
    """Two heads, the first with the weight of the embedding, the second with that too where `both`."""

    def __init__(self, tied: bool = True, both: bool = False) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(128, 64), nn.Linear(64, 64)
        self.head, self.other = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if both:
            self.other.weight = self.embedding.weight

    def forward(self, ids):
        x = F.relu(self.fc(self.embedding(ids)))
        return self.head(x) + self.other(x)


@pytest.mark.parametrize("machine", ["a100-sxm", "h200"])
def test_a_tied_head_is_the_layer_that_multiplies_and_sdgp_takes_it(machine):
    ids = torch.zeros(8, 32, dtype=torch.int64)
    tied, free = step(Tied(), ids, machine), step(Tied(tied=False), ids, machine)
    assert [(row.layer, row.product) for row in tied.rows] == [(row.layer, row.product) for row in free.rows]
    for row, other in zip(tied.rows, free.rows, strict=True):
        assert row.dense_ms == other.dense_ms and row.way("dZ") == (
            other.way("dZ") if row.product == "input gradient" or row.layer != "head" else None
        )
    head = next(row for row in tied.rows if row.layer == "head")
    assert head.weight == "head.weight" and "shared with `embedding.weight`" in head.sparse[0].reason
    handle = twofour.training.sdgp.attach(model := Tied(), product="dense")
    assert {row.layer for row in tied.rows if row.product == "input gradient" and row.way("dZ")} == set(handle.layers)
    handle.remove()
    rows = twofour.estimate(model, ids, machine=machine).rows
    assert [row.layer for row in rows] == ["fc", "head", "other"]


def test_of_layers_that_share_a_weight_all_have_to_be_pruned():
    ids = torch.zeros(8, 32, dtype=torch.int64)
    for skip, why in (((), ""), ("head", "named in `skip`"), ("other", "named in `skip`")):
        found = step(Tied(both=True), ids, skip=skip)
        ways = [row.sparse[1] for row in found.rows if row.layer == "head" and row.product == "input gradient"]
        assert [way.reason for way in ways] == [why] * 2


def test_weights_of_a_recurrent_layer_have_masks_of_their_own_and_sdgp_leaves_them():
    class Last(nn.Module):
        def __init__(self, inputs: int) -> None:
            super().__init__()
            self.lstm = nn.LSTM(inputs, 64)

        def forward(self, x):
            return self.lstm(x)[0]

    rate = MACHINES["a100-sxm"].bandwidth * FITTED.memory / 1e3
    for name, model in (("lstm.", Last(128)), ("", nn.LSTM(128, 64))):
        result = step(model, torch.randn(3, 16, 128))
        sizes = {f"{name}weight_ih_l0": 256 * 128, f"{name}weight_hh_l0": 256 * 64}
        assert dict(result.mask_ms) == pytest.approx({key: 18 * size / rate for key, size in sizes.items()})
        spent = sum(row.sparse[0].pass_ms for row in result.rows if row.product == "forward")
        whole = result.variant("2:4 weights").every_pass_ms
        assert spent > 0 and whole == pytest.approx(spent + sum(result.mask_ms.values()))
        reasons = {row.sparse[1].reason for row in result.rows if row.product == "input gradient"}
        assert reasons == {"lstm: no Linear, Conv1d or Conv2d"}
        assert result.variant("sdgp").fits == 0 and result.paper_saved == 0
    odd = step(Last(10), torch.randn(3, 16, 10))  # a weight that stays dense has no zeros to keep
    assert list(odd.mask_ms) == ["lstm.weight_hh_l0"]


def test_checkpoints_are_named_and_an_input_may_want_a_gradient():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 64)

        def forward(self, x):
            return self.last(checkpoint(self.first, x, use_reentrant=False))

    x = torch.randn(32, 64, requires_grad=True)
    result = step(Twice(), x)
    assert len(result.rows) == 6 and any("checkpoints" in note for note in result.notes)  # x wants its own, too
    assert not any("checkpoints" in note for note in step(Net(), X).notes)


def test_refusals_and_a_model_that_is_left_as_it_was():
    model = Net().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step(model, X)
    assert not model.training and all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(HardwareError, match="a training step in int8 is not priced"):
        step(model, X, dtype="int8")
    with pytest.raises(HardwareError, match=r"a training step needs an example\n.*tokens=4 alone"):
        twofour.estimate(model, tokens=4, machine="h200", training=True)
    with pytest.raises(HardwareError, match=r"a training step needs an example\n.*neither example nor tokens"):
        twofour.estimate(model, machine="h200", training=True)
    with pytest.raises(HardwareError, match=r"a training step takes no tokens\n.*tokens=4 beside an example"):
        step(model, X, tokens=4)
    for optimizer in ("adamw", "nonsense", ""):
        with pytest.raises(HardwareError, match="an optimiser says nothing of a forward pass"):
            twofour.estimate(model, X, machine="h200", training=False, optimizer=optimizer)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(HardwareError, match="the optimiser '' is unknown"):
        step(model, X, optimizer="")
    assert step(model, X, optimizer=None) == step(model, X, optimizer="adamw") == step(model, X)
    with pytest.raises(HardwareError, match="the optimiser 'lion' is unknown"):
        step(model, X, optimizer="lion")
    with pytest.raises(HardwareError, match="training steps with such weights are not priced"):
        step(model, X, pattern="block:32x32@0.9")
    with pytest.raises(HardwareError, match="the example is empty"):
        step(nn.Linear(8, 8), torch.empty(0, 8))
    with pytest.raises(HardwareError, match="the example is empty"):
        twofour.estimate(nn.Linear(8, 8), torch.empty(0, 8), machine="h200")
    handle = twofour.training.sdgp.attach(model, "2:4")
    with pytest.raises(HardwareError, match="that nothing is attached to"):
        step(model, X)
    handle.remove()
    with pytest.raises(HardwareError, match="trains nothing"):
        step(Net().requires_grad_(False), X)
    with pytest.raises(HardwareError, match="the variant 'triple' is unknown"):
        step(model, X).variant("triple")
