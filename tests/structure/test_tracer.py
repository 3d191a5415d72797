"""Random orders of every group that was traced leave the outputs what they were; what cannot move says why."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.turns import in_turn
from twofour import capture, layers
from twofour.structure import coupling
from twofour.structure.coupling import Coupling


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.norm, self.mix, self.outlet = (
            nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 8),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inlet(x)).relu()
        return self.outlet(x + self.mix(x))


class Convolutions(nn.Module):
    """Stem, depth-wise, grouped, group normalisation, squeeze and excitation, pooling and flatten with 2 x 2 places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.depthwise, self.slope = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.PReLU(32)
        self.pointwise = nn.Conv2d(16, 32, 1)
        self.grouped, self.groups = nn.Conv2d(32, 32, 3, padding=1, groups=4), nn.GroupNorm(4, 32)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2), nn.Linear(16 * 4, 8)
        nn.init.uniform_(self.norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.groups(self.grouped(self.slope(self.pointwise(self.depthwise(x)))))
        x = x * self.excite(self.squeeze(F.adaptive_avg_pool2d(x, 1)).relu()).sigmoid()
        x = F.adaptive_avg_pool2d(F.max_pool2d(self.up(x), 2), 2)
        return self.last(torch.flatten(x, 1))


class Attention(nn.Module):
    """Grouped-query attention with a fused projection, then a gated MLP from one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.qkv, self.out = nn.Linear(32, 32 + 2 * 16), nn.Linear(32, 32)
        self.gate_up, self.down, self.norm = nn.Linear(32, 48), nn.Linear(24, 32), nn.RMSNorm(32)
        self.head = nn.Linear(32, 20, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm(x)).split([32, 16, 16], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.head(x + self.down(F.silu(gate) * up))


class Tied(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Concatenated(nn.Module):
    """DenseNet's way: what was computed stands beside what came in; padded and cut again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        wide = F.pad(torch.cat([a, self.b(a).relu()], dim=-1), (8, 8))
        return self.c(wide + torch.cat([F.pad(a, (16, 0)), a.flip(0)], dim=-1)[..., :48])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.lstm, self.a, self.b = nn.Linear(8, 16), nn.LSTM(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.lstm(self.inlet(x))[0]).relu())


class Directions(nn.Module):
    """Two layers in both directions, then gates of another kind, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.gru, self.outlet = nn.GRU(12, 6, bias=False, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(self.gru(self.lstm(x)[0])[0])


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.attention, self.a = nn.Linear(8, 16), nn.MultiheadAttention(16, 2), nn.Linear(16, 16)
        self.b = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.b(self.a(x).relu() + x)


def traced(model: nn.Module, *example: Tensor) -> Coupling:
    weights = layers.walk(model, eligibility="any").weights
    return coupling.trace(model.eval(), capture.arguments(model, example, {}), weights)


def shuffle(model: nn.Module, found: Coupling) -> None:
    """Move the channels of every group at random."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    generator = torch.Generator().manual_seed(0)
    for group in found.groups:
        orders = torch.stack([torch.randperm(group.size, generator=generator) for _ in range(group.blocks)])
        for place in group.places:
            tensor = tensors[place.name].detach()
            tensor.copy_(place.moved(tensor, orders))


ids = torch.arange(12).view(2, 6)
image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
rows = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "residual": (Residual, rows, 1),
    "convolutions": (Convolutions, image, 4),
    "attention": (Attention, ids, 3),
    "tied": (Tied, ids, 3),
    "concatenated": (Concatenated, rows, 1),
    "recurrent": (Recurrent, rows, 3),
    "directions": (Directions, rows, 2),
    "multihead": (Multihead, rows, 2),
}


@in_turn("name", MODELS)
def test_random_orders_of_all_groups_change_nothing(name: str) -> None:
    torch.manual_seed(0)
    make, example, groups = MODELS[name]
    model = make().double().eval()
    example = example.double() if example.is_floating_point() else example
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        reference = model(example)
        found = traced(model, example)
        shuffle(model, found)
        answer = model(example)
    assert len(found.groups) >= groups, found
    torch.testing.assert_close(answer, reference, rtol=1e-10, atol=1e-12)
    assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())


def reasons(found: Coupling) -> dict[str, str]:
    return {name: refusal.reason for refusal in found.refused for name in refusal.consumers}


def test_a_residual_stream_is_one_group_with_its_normalisation() -> None:
    (group,) = traced(Residual(), rows).groups
    assert (group.size, group.blocks) == (16, 1)
    assert set(group.consumers) == {"mix.weight", "outlet.weight"}
    assert set(group.producers) == {"inlet.weight", "inlet.bias", "norm.weight", "norm.bias", "mix.bias"}
    assert [place.axis for place in group.places_of("mix.weight")] == [0, 1]


def test_inputs_and_outputs_of_the_model_stay() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.a(x)
            return x, self.b(x)

    found = traced(Plain(), rows)
    assert not found.groups
    assert reasons(found) == {"a.weight": "an input of the model", "b.weight": "an output of the model"}


def test_groups_of_convolutions_stay_within() -> None:
    found = traced(Convolutions(), image)
    grouped = next(group for group in found.groups if "grouped.weight" in group.consumers)
    assert (grouped.size, grouped.blocks) == (8, 4)
    assert {"pointwise.weight", "pointwise.bias", "slope.weight"} <= set(grouped.producers)
    pointwise = next(group for group in found.groups if "pointwise.weight" in group.consumers)
    assert (pointwise.size, pointwise.blocks) == (16, 1)
    assert {"stem.weight", "norm.running_var", "depthwise.weight", "depthwise.bias"} <= set(pointwise.producers)


def test_a_flatten_of_places_moves_channels_in_blocks() -> None:
    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 8, 1), nn.Linear(16 * 4, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = F.adaptive_avg_pool2d(self.a(x), 2)
            return self.c(x.flatten(1)), self.b(x)

    found = traced(Flattened(), image)
    (group,) = found.groups
    (place,) = group.places_of("c.weight")
    assert group.consumers == ("b.weight",)
    assert place.index.tolist() == [channel for channel in range(16) for _ in range(4)]
    assert set(place.stride.tolist()) == {4}


def test_heads_stay_and_query_heads_of_one_group_share_an_order() -> None:
    found = traced(Attention(), ids)
    out = next(group for group in found.groups if "out.weight" in group.consumers)
    assert (out.size, out.blocks) == (8, 2)
    assert set(out.producers) == {"qkv.weight", "qkv.bias"}
    (place,) = out.places_of("qkv.bias")
    assert (place.index >= 0).nonzero().flatten().tolist() == list(range(48, 64)), "the values alone"
    down = next(group for group in found.groups if "down.weight" in group.consumers)
    assert (down.size, down.blocks) == (24, 1)


def test_what_has_no_rule_keeps_its_order_and_the_rest_moves() -> None:
    class Ordered(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.inlet(x).cumsum(-1)).relu())

    found = traced(Ordered(), rows)
    assert [group.consumers for group in found.groups] == [("b.weight",)]
    assert "no rule for the operator `cumsum`" in reasons(found)["a.weight"]


def test_states_of_a_recurrent_layer_move_with_its_gates() -> None:
    found = traced(Recurrent(), rows)
    states = next(group for group in found.groups if "a.weight" in group.consumers)
    assert states.size == 16 and set(states.consumers) == {"a.weight", "lstm.weight_hh_l0"}
    (place,) = states.places_of("lstm.bias_ih_l0")
    assert place.index.tolist() == 4 * list(range(16))


def test_parameters_that_the_example_does_not_use_are_named() -> None:
    model = Residual()
    model.other = nn.Linear(4, 4)
    assert traced(model, rows).unused == ("other.weight", "other.bias")


def test_memory_shared_by_different_parameters_stays() -> None:
    model = Residual()
    model.mix.bias = nn.Parameter(model.inlet.bias.detach())
    found = traced(model, rows)
    assert not found.groups
    assert "shares memory with" in reasons(found)["mix.weight"]


def test_tracing_leaves_the_mode_of_the_model() -> None:
    model = Residual().train()
    model.norm.eval()
    weights = layers.walk(model, eligibility="any").weights
    coupling.trace(model, {"x": rows}, weights)
    assert model.training and not model.norm.training


def test_channels_that_local_response_norm_sums_keep_their_order_and_the_reason_names_it() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 1), nn.LocalResponseNorm(5), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1))
    found = traced(model, torch.randn(1, 16, 4, 4))
    assert reasons(found)["2.weight"] == "neighbours that a pooling or LocalResponseNorm takes together"
    assert [group.consumers for group in found.groups] == [("3.weight",)]
