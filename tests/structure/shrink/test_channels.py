"""What can be cut of networks of every kind, and that the small model computes what the masked large one does."""

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.structure.shrink.networks import IMAGE, NETWORKS, TRANSFORMERS, Squeeze, Wide, made
from tests.turns import in_turn
from twofour import calls
from twofour.errors import ShrinkError
from twofour.shrinking.budget import Budget, Prices
from twofour.shrinking.choose import choose
from twofour.shrinking.curves import magnitude
from twofour.structure import shrink
from twofour.structure.shrink import Channels, Cuttable
from twofour.structure.shrink.trial import UNSHOWN

EXPECTED = {
    "resnet20": (10, {"conv1.weight:0", "layer1.0.conv1.weight:0", "layer3.2.conv1.weight:0"}),
    "mobilenet": (5, {"features.0.0.weight:0", "features.1.parts.0.0.weight:0"}),
    "densenet": (7, {"stem.weight:0", "layers.0.2.weight:0", "wide.weight:0", "wide.weight:0#2"}),
    "unet": (5, {"down.0.weight:0", "inner.0.weight:0", "bottom.0.weight:0", "up.weight:1", "last.0.weight:0"}),
    "tagger": (3, {"embed.weight:1", "lstm.weight_ih_l0:0", "gru.weight_ih_l0:0"}),
    "squeeze": (3, {"conv.0.weight:0", "squeeze.weight:0", "gate.weight:0"}),
    "vit": (5, {"vit.layers.0.attention.q_proj.weight:0", "vit.layers.1.mlp.fc1.weight:0"}),
    "bert": (6, {"bert.encoder.layer.0.attention.self.query.weight:0", "bert.pooler.dense.weight:0"}),
    "gpt2": (5, {"transformer.h.0.attn.c_attn.weight:1", "transformer.h.1.mlp.c_fc.weight:1"}),
    "llama": (7, {"model.layers.0.self_attn.q_proj.weight:0", "model.layers.0.self_attn.q_proj.weight:0#2"}),
    "t5": (5, {"decoder.block.0.layer.1.EncDecAttention.q.weight:0"}),
}
"""How many groups there are, and some of them: channels, heads, groups of a convolution, states, query groups."""

NORMALISED = {
    "densenet": {"grouped.weight:0"},
    "vit": {"vit.embeddings.cls_token:2"},
    "bert": {"bert.embeddings.word_embeddings.weight:1"},
    "gpt2": {"transformer.wpe.weight:1"},
    "llama": {"model.embed_tokens.weight:1"},
}
"""Groups that a normalisation runs along."""


def some_of(groups: Sequence[Cuttable], seed: int) -> dict[str, Tensor]:
    """Keep channels at random, another share of each group."""
    generator = torch.Generator().manual_seed(seed)
    widths = {g.name: min(max(1, g.size * (8, 5, 6)[n % 3] // 10), g.size - 1) for n, g in enumerate(groups)}
    return {g.name: torch.randperm(g.size, generator=generator)[: widths[g.name]].sort().values for g in groups}


def answers(model: nn.Module, example: Any) -> list[Tensor]:
    with torch.no_grad(), calls.without_cache(model):
        found = calls.output_leaves(calls.call(model, calls.fresh(example)))
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def require_masked_equals_small(
    model: nn.Module, example: Any, found: Channels, groups: Sequence[Sequence[Cuttable]]
) -> None:
    for chosen in groups:
        plan = found.plan(some_of(chosen, seed=len(chosen)))
        small = shrink.cut(model, plan)
        wanted, given = answers(shrink.masked(model, plan), example), answers(small, example)
        for before, after in zip(wanted, given, strict=True):
            scale = float(before.abs().max())
            assert float((before - after).abs().max()) <= 1e-5 * scale, chosen[0].name
        assert not torch.allclose(given[0], answers(model, example)[0], atol=1e-3 * scale), chosen[0].name
        before, after = (sum(p.numel() for p in m.parameters()) for m in (model, small))
        assert after < before


@in_turn("name", [*NETWORKS, *TRANSFORMERS])
def test_the_small_model_computes_what_the_masked_one_does(name: str) -> None:
    if name in TRANSFORMERS:
        pytest.importorskip("transformers", reason="needs the extra [text]")
    model, example = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = shrink.channels(model, example)
    count, some = EXPECTED[name]
    assert len(found.groups) == count and some <= found.by_name.keys(), [group.name for group in found.groups]
    assert {group.name for group in found.groups if not group.exact} == NORMALISED.get(name, set())
    exact = [group for group in found.groups if group.exact]
    require_masked_equals_small(model, example, found, [exact])
    for group in found.groups:
        if not group.exact:
            small = shrink.cut(model, found.plan(some_of([group], 1)))
            shapes = [a.shape == b.shape for a, b in zip(answers(small, example), answers(model, example), strict=True)]
            assert all(shapes), group.name
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "the model is as it was"


@pytest.mark.long
@pytest.mark.parametrize("name", [*NETWORKS, *TRANSFORMERS])
def test_every_group_by_itself_and_onnx_runtime_agrees(name: str, tmp_path: Path) -> None:
    if name in TRANSFORMERS:
        pytest.importorskip("transformers", reason="needs the extra [text]")
    pytest.importorskip("onnxruntime", reason="needs the extra [onnx]")
    model, example = made(name)
    found = shrink.channels(model, example)
    exact = [group for group in found.groups if group.exact]
    require_masked_equals_small(model, example, found, [[group] for group in exact])
    small = shrink.cut(model, found.plan(some_of(exact, 0)))
    with calls.without_cache(small):
        assert twofour.export.to_onnx(small, tmp_path / "small.onnx", example, dynamic=False).error < 1e-5


def test_models_that_are_no_longer_dense_are_refused() -> None:
    x = torch.randn(4, 16)
    for change in (
        lambda net: twofour.compile(net, x, graph=False),
        lambda net: twofour.prune(net, "2:4", eligibility="any"),
        lambda net: twofour.quantize(net, "w4", None),
    ):
        net = change(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)))
        with pytest.raises(ShrinkError, match="cannot be shrunk any more"):
            shrink.channels(net, x)


def test_sizes_and_numbers_of_the_layers_follow() -> None:
    model, example = made("mobilenet")
    found = shrink.channels(model, example)
    small: Any = shrink.cut(model, found.plan({"features.1.parts.0.0.weight:0": range(10)}))
    expand, depthwise, project = (small.features[1].parts[i][0] for i in (0, 1, 2))
    assert (expand.out_channels, depthwise.groups, depthwise.in_channels, depthwise.out_channels) == (10, 10, 10, 10)
    assert project.in_channels == 10 and small.features[1].parts[1][1].num_features == 10
    model, example = made("densenet")
    found = shrink.channels(model, example)
    small = shrink.cut(model, found.plan({"wide.weight:0": [1, 3], "wide.weight:0#2": [0, 1, 5]}))
    assert (small.grouped.groups, small.grouped.in_channels, small.grouped.out_channels) == (2, 6, 6)
    assert (small.norm.num_groups, small.norm.num_channels, small.head.in_features) == (2, 6, 24)
    model, example = made("tagger")
    found = shrink.channels(model, example)
    small = shrink.cut(model, found.plan({"lstm.weight_ih_l0:0": [0, 2, 9]}))
    assert (small.lstm.hidden_size, small.gru.input_size) == (3, 6)


def test_heads_are_counted_where_the_forward_counts_them_and_tied_weights_stay_tied() -> None:
    pytest.importorskip("transformers", reason="needs the extra [text]")
    model, example = made("gpt2")
    found = shrink.channels(model, example)
    kept = {"transformer.h.0.attn.c_attn.weight:1": [0, 2, 3], "transformer.wpe.weight:1": range(24)}
    small: Any = shrink.cut(model, found.plan(kept))
    attention = small.transformer.h[0].attn
    assert (attention.num_heads, attention.split_size) == (3, 24)
    assert (attention.c_attn.nx, attention.c_attn.nf, attention.c_proj.nx) == (24, 72, 24)
    assert small.lm_head.weight is small.transformer.wte.weight and small.lm_head.in_features == 24
    stream = found.by_name["transformer.wpe.weight:1"]
    assert stream.group.stream and not stream.exact and stream.group.normalised == "layer_norm"
    assert not found.by_name["transformer.h.0.mlp.c_fc.weight:1"].group.stream


def test_what_cannot_be_cut_has_its_reason_and_the_rest_is_cut() -> None:
    model, example = made("squeeze")
    reasons = {name: uncut.reason for uncut in shrink.channels(model, example).uncut for name in uncut.names}
    assert reasons["head.bias"] == "an output of the model"
    assert "no rule for the operator `flip`" in reasons["down.weight"]

    class Own(Squeeze):
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).mean((2, 3)).view(-1, 12)
            return self.head(self.down(nn.functional.silu(self.gate(x)) * self.up(x)))

    found = shrink.channels(Own().eval(), IMAGE)
    assert [group.name for group in found.groups] == ["gate.weight:0", "down.weight:0"]
    (own,) = [uncut for uncut in found.uncut if "conv.0.weight" in uncut.names and uncut.size == 12]
    assert "does not run without some of them" in own.reason and "12" in str(own)


class Watched(nn.Module):
    """A forward that brings a number along, which is wrong once channels go, and outputs of some kind."""

    def __init__(self, watch: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.watch = nn.Linear(8, 16), nn.Linear(16, 4), watch

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        return self.watch(self.down(hidden / hidden.shape[-1]), x)


@pytest.mark.parametrize(
    "watch",
    [
        lambda y, x: y + torch.log(-x.abs().sum() - 1) * 0,
        lambda y, x: y > -100,
        lambda y, x: y * 0,
        lambda y, x: (y + x[:, :4] * torch.inf).clamp(-1, 1),
    ],
    ids=["nan", "one answer", "zeros", "drowned"],
)
def test_outputs_that_do_not_depend_on_the_channels_show_nothing(watch: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    found = shrink.channels(Watched(watch), x)
    (held,) = [uncut for uncut in found.uncut if "up.bias" in uncut.names]
    assert not found.groups and "the example does not show it" in held.reason
    found = shrink.channels(Watched(lambda y, x: y), x)
    assert "an output differs by" in "".join(uncut.reason for uncut in found.uncut if "up.bias" in uncut.names)


def test_channels_are_not_shown_by_others_that_are() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
            self.unseen = Watched(lambda y, x: y * 0)

        def forward(self, x: Tensor) -> Tensor:
            return self.seen(x) + self.unseen(x)

    found = shrink.channels(Beside(), torch.randn(4, 8))
    assert [group.name for group in found.groups] == ["seen.0.weight:0"]
    assert [uncut.reason for uncut in found.uncut if "unseen.up.bias" in uncut.names] == [UNSHOWN]


def test_groups_that_one_number_counts_get_one_width() -> None:
    torch.manual_seed(0)
    model, x = Wide().eval(), torch.randn(4, 16)
    found = shrink.channels(model, x)
    first, second = found.groups
    assert first.attributes == second.attributes == (("", "width"),)
    for kept in ({first.name: range(8)}, {first.name: range(8), second.name: range(9)}):
        with pytest.raises(ShrinkError, match="one number counts") as caught:
            found.plan(kept)
        assert caught.value.layer == "" and f"for {first.name} and 1 more" in str(caught.value.got)
    plan = found.plan({first.name: range(8), second.name: range(2, 10)})
    torch.testing.assert_close(shrink.cut(model, plan)(x), shrink.masked(model, plan)(x))
    with torch.no_grad():
        model.up[1].weight *= torch.linspace(0, 1, 64)[:, None] ** 4
    small: Any = twofour.shrink(model, x, 0.6)
    curves = {g.name: magnitude(g, dict(model.named_parameters()), {}, (64, 32)) for g in found.groups}
    prices = Prices(found, lambda name, sizes: prod(sizes))
    del curves[second.name]
    with pytest.raises(ShrinkError, match=r"at least 1\.000"):  # one that is not to be cut holds the other
        choose(prices, curves, Budget(0.6), prices.total)
    assert small(x).shape == (4, 2) and small.up[0].out_features == small.up[1].out_features == small.width < 64


def test_a_refusal_says_that_not_all_numbers_were_tried() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.grouped = nn.Conv2d(3, 24, 1), nn.Conv2d(24, 12, 3, groups=4)
            self.a = self.b = self.c = self.d = 24

        def forward(self, x: Tensor) -> Tensor:
            return self.grouped(self.wide(x).relu().view(-1, 24, 8, 8))

    reasons = [uncut.reason for uncut in shrink.channels(Many().eval(), IMAGE).uncut]
    assert any("8 were tried, not all" in reason for reason in reasons), reasons


def test_what_cannot_be_run_or_traced_is_refused() -> None:
    with pytest.raises(ShrinkError, match="does not run on the example"):
        shrink.channels(nn.Linear(4, 4), torch.randn(2, 3))

    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.sum()) > 0 else x

    with pytest.raises(ShrinkError, match="cannot be captured as a graph"):
        shrink.channels(Branch(4, 4), torch.ones(2, 4))


@in_turn("kept", [[], [16], [-1], [0.5], [True, False], torch.zeros(16, dtype=torch.bool), [[1]]])
def test_impossible_choices_are_refused(kept: Any) -> None:
    model, example = made("squeeze")
    found = shrink.channels(model, example)
    with pytest.raises(ShrinkError, match=r"layer `gate.weight:0`.*impossible"):
        found.plan({"gate.weight:0": kept})
    with pytest.raises(ShrinkError, match="the channels are not known"):
        found.plan({"gate": [0]})
