"""Models with 2:4 and dense groups in one weight: criteria, compiled layers, graphs, files, joined weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import twofour
from tests.compiler.small import quick
from tests.compiler.test_conv import first_sparse
from tests.test_hybrid import RULES, net, sparse
from tests.turns import in_turn
from twofour import masks
from twofour.allocation import Budget, allocate, sensitivity, timed
from twofour.compiler import choose_conv
from twofour.compiler.choose_conv import conv_candidates
from twofour.compiler.computing import Computing
from twofour.compiler.fused_matmuls import joined
from twofour.compiler.plan import Plan
from twofour.errors import PackingError, PatternError, RecipeError, TwofourError
from twofour.export.card import card
from twofour.kernels import Kernel, find
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry
from twofour.kernels.nm_conv import hybrid_conv_rows
from twofour.packing import Packed, pack
from twofour.packing.formats import HybridRows
from twofour.patterns import Hybrid, parse


def test_criteria_choose_regions_by_their_own_error() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 64) * torch.where(torch.arange(64) < 8, 8.0, 0.1)
    errors = {}
    for criterion in ("magnitude", "wanda", "sparsegpt", "admm"):
        for text in ("2:4", "2:4+12.5%"):
            torch.manual_seed(1)
            layer = nn.Linear(64, 48)
            model = nn.Sequential(layer)
            twofour.prune(model, text, criterion=criterion, data=[x], reconstruct=False, progress=False)
            (outcome,) = twofour.pruning.outcomes(model)
            errors[criterion, text] = outcome.error
            assert parse(text).check(layer.weight.detach()).ok
        if criterion != "magnitude":  # large inputs stand in the first two of sixteen groups
            assert (layer.weight.detach()[:, :8] != 0).all()
            assert errors[criterion, "2:4+12.5%"] < 0.5 * errors[criterion, "2:4"]


def test_a_model_goes_through_the_pipeline(tmp_path: Path) -> None:
    model, x = net(), torch.randn(24, 64)
    twofour.prune(model, RULES, criterion="magnitude")
    assert twofour.check(model).ok
    fast = quick(model, x, memory="small")
    assert isinstance(fast.plan, Plan)
    found = {layer.name: find(layer.kernel, Kernel).operation for layer in fast.plan.layers}
    assert found == {"0": "hybrid_matmul", "2": "nm_matmul", "4": "hybrid_matmul"}
    path = tmp_path / "model.safetensors"
    twofour.save(fast, path)
    assert (
        twofour.check(path).ok
        and twofour.check(path, expect={f"{layer}.weight": text for layer, text in RULES.items()}).ok
    )
    again = twofour.load(path, net(), memory="small")
    masked = twofour.load(path, net(), masked=True)
    with torch.inference_mode():
        want = model(x)
        torch.testing.assert_close(fast(x), want)
        torch.testing.assert_close(again(x), want)
    assert {name: mask.pattern.name for name, mask in masks.of(masked).items()} == {
        f"{layer}.weight": text for layer, text in RULES.items()
    }
    assert torch.equal(masked.state_dict()["0.weight"], model.state_dict()["0.weight"])
    assert not twofour.check(path, expect={"0.weight": "2:4+12.5%"}).ok


def test_types_without_kernels_say_so() -> None:
    weight, reason = Computing("int4").encode(sparse("2:4+25%", 16, 64), parse("2:4+25%"))
    assert isinstance(weight, Tensor) and "2:4+25%" in reason and "int4" in reason


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_layers_run_in_fewer_bits_and_come_back_from_a_file(dtype: str, tmp_path: Path) -> None:
    model, x = net(), torch.randn(24, 64)
    twofour.prune(model, RULES, criterion="magnitude")
    fast = quick(model, x, dtype=dtype, memory="small")
    assert isinstance(fast.plan, Plan)
    assert [find(layer.kernel, Kernel).operation for layer in fast.plan.layers] == [
        "hybrid_matmul",
        "nm_matmul",
        "hybrid_matmul",
    ]
    path = tmp_path / "model.safetensors"
    twofour.save(fast, path)
    assert twofour.check(path, expect={f"{layer}.weight": text for layer, text in RULES.items()}).ok
    again = twofour.load(path, net(), memory="small")
    with torch.inference_mode():
        y, want = fast(x), model(x)
        assert torch.equal(again(x), y)
    assert (y - want).norm() <= 0.03 * want.norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_graph_hands_bytes_and_halves_to_dense_groups(dtype: str) -> None:
    """Static ranges in int8: what one product hands the next are bytes, which stand twice as they are."""
    model, x = net(), torch.randn(64, 64)
    twofour.prune(model, RULES, criterion="magnitude")
    options: dict[str, Any] = {"data": [x]} if dtype == "int8" else {}
    fast = twofour.compile(model, x, dtype=dtype, tokens=(64,), graph=True, effort="quick", memory="small", **options)
    with torch.inference_mode():
        want = model(x)
        assert (fast(x) - want).norm() <= 0.04 * want.norm()


def test_several_products_of_one_weight_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, groups=2))
    with pytest.raises(RecipeError, match=r"2:4\+25% cannot be laid over a weight of 2 products"):
        twofour.prune(model, "2:4+25%", criterion="admm", data=[torch.randn(2, 16, 6, 6)], eligibility="any")
    assert twofour.check(twofour.prune(model, "2:4+25%", criterion="magnitude", eligibility="any")).ok


@pytest.mark.parametrize("criterion", ["auto", "sparsegpt", "wanda"])
def test_self_attention_is_one_product(criterion: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 2, 32, batch_first=True))
    twofour.prune(model, "2:4+25%", criterion=criterion, data=[torch.randn(40, 3, 32)], progress=False)
    found = masks.of(model)["0.self_attn.in_proj_weight"].keep
    assert twofour.check(model, expect="2:4+25%").ok and found.view(96, 8, 4).all(-1).all(0).sum() == 2


def test_a_budget_of_time_turns_the_dial_layer_by_layer() -> None:
    model, x = net(), torch.randn(32, 64)
    found = sensitivity(model, [x], ("dense", "2:4", "2:4+25%"), progress=False)
    found = timed(found, model, x)
    for layer in found.layers:
        dense, regular, hybrid = layer.candidates
        assert dense.error < hybrid.error < regular.error and regular.kept < hybrid.kept < dense.kept
        assert hybrid.ms is not None and dense.ms is not None and hybrid.ms <= dense.ms
    # What a machine measures is its own; here each dense group costs as much as the last.
    costs = {"dense": 2.0, "2:4": 1.0, "2:4+25%": 1.25}
    priced = replace(found, layers=tuple(
        replace(layer, candidates=tuple(replace(entry, ms=costs[entry.pattern]) for entry in layer.candidates))
        for layer in found.layers
    ))  # fmt: skip
    chosen = allocate(priced, Budget(latency=3.8))
    assert sorted(pattern for _, pattern in chosen.chosen) == ["2:4+25%"] * 3
    twofour.prune(model, chosen.recipe)
    assert {mask.pattern for mask in masks.of(model).values()} == {Hybrid(2, 4, 25)}


class Attending(nn.Module):
    """Query, key and value of one input, which a graph makes by one product where their weights allow it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], 2, 32).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@in_turn("dtype", ["float32", "bfloat16", "int8"])
@in_turn("pattern", ["2:4+12.5%", "block:8x4@0.9", "2:4"])
def test_weights_are_joined_where_their_rows_can_stand_below_each_other(pattern: str, dtype: str) -> None:
    """Which kernels win is the machine's affair; where packed ones do, their products stay apart or are one."""
    torch.manual_seed(0)
    model, x = Attending().eval(), torch.randn(2, 32, 64)
    twofour.prune(model, pattern, criterion="magnitude")
    fast = twofour.compile(model, x, dtype=dtype, tokens=(64,), graph=True, effort="quick")
    with torch.inference_mode():
        within = None if dtype == "float32" else 0.05
        torch.testing.assert_close(fast(x), model(x), rtol=within, atol=within)
    weights = [pack(layer.weight, pattern, dtype) for layer in (model.query, model.key)]
    found = joined(weights)
    assert (found is None) == ("block" in pattern)
    if isinstance(found, Packed):
        assert torch.equal(found.unpack(), torch.cat([weight.unpack() for weight in weights]))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(["2:4", "2:4+1%", "2:4+20%", "2:4+40%"]), min_size=2, max_size=4), st.integers(1, 9),
       st.sampled_from(["float32", "bfloat16", "int8"]), st.integers(0, 99))  # fmt: skip
def test_what_is_dense_in_one_of_the_weights_of_an_input_is_dense_in_all(patterns, groups, dtype, seed):
    weights = [pack(sparse(text, 3 + i, 8 * groups, seed=seed + i), text, dtype) for i, text in enumerate(patterns)]
    found = joined(weights)
    dense = {group for w in weights if isinstance(w.header.format, HybridRows) for group in
             w.header.format.dense_groups(w.indices).tolist()}  # fmt: skip
    if found is None:
        assert len(dense) == 2 * groups, "no group is left that is 2:4"
        return
    assert isinstance(found, Packed)
    found.validate()
    assert torch.equal(found.unpack(), torch.cat([weight.unpack() for weight in weights]))
    form = found.header.format
    assert isinstance(form, HybridRows) == any("+" in text for text in patterns)
    assert not isinstance(form, HybridRows) or set(form.dense_groups(found.indices).tolist()) == dense


def test_weights_that_are_not_alike_stay_apart() -> None:
    first = pack(sparse("2:4+25%", 8, 32), "2:4+25%")
    for text, dtype in (("2:4+25%", "bfloat16"), ("1:4", "float32"), ("1:4+25%", "float32")):
        assert joined([first, pack(sparse(text, 8, 32), text, dtype)]) is None
    assert joined([first, sparse("2:4", 8, 32)]) is None


@pytest.mark.parametrize("criterion", ["magnitude", "wanda", "sparsegpt", "admm", "taylor"])
def test_weights_of_one_input_share_their_dense_groups(criterion: str) -> None:
    """Chosen for all of their rows: as one weight with these rows has them."""
    torch.manual_seed(0)
    model, data = Attending().eval(), [torch.randn(4, 8, 64) for _ in range(4)]
    pairs = {"data": [(x, x) for x in data], "loss": lambda y, x: (y - x).square().mean()}
    options: dict[str, Any] = pairs if criterion == "taylor" else {"data": data}
    linear = nn.Linear(64, 192, bias=False)
    whole = nn.Sequential(linear)
    linear.weight.data.copy_(torch.cat([layer.weight for layer in (model.query, model.key, model.value)]))
    twofour.prune(model, "2:4+25%", criterion=f"{criterion}:over=input", reconstruct=False, progress=False, **options)
    found = {name: mask.keep.view(64, 16, 4).all(-1).all(0) for name, mask in masks.of(model).items()}
    query, key, value = found.values()
    assert torch.equal(query, key) and torch.equal(key, value) and query.sum() == 4
    assert all("dense groups chosen with" in outcome.note for outcome in twofour.pruning.outcomes(model))
    if criterion != "taylor":
        twofour.prune(whole, "2:4+25%", criterion=criterion, reconstruct=False, progress=False, data=data)
        weights = torch.cat([layer.weight.detach() for layer in (model.query, model.key, model.value)])
        assert torch.equal(weights, linear.weight.detach())
    weights = [pack(layer.weight.detach(), "2:4+25%") for layer in (model.query, model.key, model.value)]
    one = joined(weights)
    assert isinstance(one, Packed) and one.header.pattern == "2:4+25%"


def test_a_weight_that_cannot_be_ranked_is_named_among_those_of_its_input() -> None:
    model, data = Attending().eval(), [torch.randn(4, 8, 64)]
    with torch.no_grad():
        model.key.weight[3, 5] = torch.nan
    with pytest.raises(PatternError, match=r"`key\.weight`: the weight(.|\n)*\(3, 5\)"):
        twofour.prune(model, "2:4+25%", criterion="wanda:over=input", progress=False, data=data)


def test_what_no_data_show_cannot_be_shared() -> None:
    with pytest.raises(RecipeError, match="over the weights of one input"):
        twofour.prune(net(), "2:4+25%", criterion="magnitude:over=input")
    with pytest.raises(RecipeError, match="over the weights of one input"):
        twofour.prune(net(), "2:4", criterion="wanda:over=input", data=[torch.randn(8, 64)], progress=False)


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 16, 1), nn.Conv1d(16, 8, 3)
    return nn.Sequential(*layers[:4], nn.Flatten(2), layers[4]).eval()


def test_convolutions_run_dense_groups_and_come_back_from_a_file(tmp_path: Path, monkeypatch) -> None:
    """Alone, in a graph that folds the normalisation into the weight, and out of a file."""
    monkeypatch.setattr(choose_conv, "pick", lambda times, *_, **__: find(first_sparse(times), ConvKernel))
    model, x = convolutions(), torch.randn(2, 16, 6, 5)
    twofour.prune(model, {"5": "2:4", "*": "2:4+25%"}, criterion="magnitude", eligibility="any")
    for graph in (False, True):
        fast = twofour.compile(model, x, tokens=(1,), graph=graph)
        assert isinstance(fast.plan, Plan)
        plan = {layer.name: layer for layer in fast.plan.layers}
        assert plan["0"].kernel.startswith("hybrid_conv_f32_blocks"), fast.plan
        assert plan["3"].kernel.startswith("hybrid_conv_f32"), fast.plan
        for images in (x, torch.randn(3, 16, 4, 4)):
            torch.testing.assert_close(fast(images), model(images), atol=1e-5, rtol=1e-5)
        assert torch.equal(copy.deepcopy(fast)(x), fast(x))
        path = tmp_path / "regions.safetensors"
        twofour.save(fast, path)
        assert twofour.check(path, expect={"0.weight": "2:4+25%", "3.weight": "2:4+25%"}).ok
        again = twofour.load(path, convolutions(), example=x)
        torch.testing.assert_close(again(x), model(x), atol=1e-5, rtol=1e-5)


def test_dense_groups_of_several_products_are_refused_by_name() -> None:
    geometry, weight = Geometry(16, 16, (3, 3), groups=2), sparse("2:4+25%", 16, 3, 3, 8).movedim(-1, 1)
    found, because = conv_candidates(weight, geometry, parse("2:4+25%"), "")
    assert all(not kernel.sparse for kernel in found)
    assert because == "2:4+25%: dense groups of inputs are those of one product, not of 2 groups of channels"
    row = hybrid_conv_rows()[0]
    with pytest.raises(PackingError, match="dense groups needs it packed"):
        row.prepare(sparse("2:4", 8, 3, 3, 16).movedim(-1, 1).contiguous(), Geometry(16, 8, (3, 3)))


def test_a_convolution_whose_bytes_say_what_cannot_be_is_refused() -> None:
    geometry, x = Geometry(16, 8, (3, 3)), torch.randn(1, 16, 6, 6)
    row = next(row for row in hybrid_conv_rows() if row.isa == "scalar")
    held = row.prepare(pack(sparse("2:4+25%", 8, 3, 3, 16).movedim(-1, 1).contiguous(), "2:4+25%", axis=1), geometry)
    for place, value in ((0, 36), (0, -1), (0, 1 << 30), (1, -1), (2, 36)):
        tensor = held.tensor.clone()
        tensor[64:].view(torch.int32)[place] = value
        with pytest.raises(TwofourError):
            row.run(x, replace(held, tensor=tensor), None, ConvProblem.of(geometry))


def test_the_card_brings_masks_back() -> None:
    for pattern, said in (("2:4+25%", True), ("2:4", False)):
        text = card("m", "AutoModel", {"a": pattern}, {"a": 0.5}, 0, None, None)
        assert ("twofour.load(" in text) is said
