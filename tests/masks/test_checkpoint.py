"""Masks beside a state dict: exact, derived, and reconciled with what load_state_dict brings."""

import io
import logging

import pytest
import torch
from torch import nn

import twofour
from twofour import layers, masks, patterns
from twofour.errors import MaskError, PatternError
from twofour.patterns import NM
from twofour.recipe import Recipe


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 16), nn.Conv2d(16, 8, 3), nn.Conv1d(32, 8, 1))


def masked(model: nn.Module, pattern: str = "2:4") -> nn.Module:
    chosen = patterns.parse(pattern)
    for weight in layers.walk(model).weights:
        scores = weight.reduction_last(weight.parameter.detach())
        masks.attach(weight, weight.from_reduction_last(chosen.project(scores, absolute=True)), chosen)
    return model


def keeps(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: mask.keep.clone() for name, mask in masks.of(model).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "4:8-pairs"])
def test_masks_survive_a_file_without_pickle(pattern: str) -> None:
    model = masked(network(), pattern)
    with torch.no_grad():
        model[0].weight[0, :].zero_()  # the weight alone no longer says what the mask was
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "masks": masks.state_dict(model)}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = network()
    fresh.load_state_dict(saved["model"])
    restored = masks.load_state_dict(fresh, saved["masks"])
    assert same(keeps(fresh), keeps(model)) and list(restored) == list(keeps(model))
    assert all(str(mask.pattern) == pattern for mask in restored.values())
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), model.state_dict().values(), strict=True))


def test_a_saved_mask_takes_one_bit_a_value() -> None:
    keep = torch.tensor([[1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 0, 0]] * 3, dtype=torch.bool)
    layer = nn.Linear(12, 3)
    (weight,) = layers.walk(layer, eligibility="any").weights
    masks.attach(weight, keep, "2:4")
    (saved,) = masks.state_dict(layer).values()
    assert saved["pattern"] == "2:4" and saved["shape"] == (3, 12) and saved["bits"].shape == (3, 2)
    rows = [[sum(bit << place for place, bit in enumerate(row[at : at + 8])) for at in (0, 8)] for row in keep.tolist()]
    assert saved["bits"].tolist() == rows


def test_masks_loaded_over_other_masks_replace_them() -> None:
    torch.manual_seed(0)
    source, target = masked(network()), masked(network())
    assert not same(keeps(source), keeps(target))
    masks.load_state_dict(target, masks.state_dict(source))
    assert same(keeps(source), keeps(target))


def test_a_tied_weight_is_found_by_any_of_its_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    model["b"].weight = model["a"].weight
    state = masks.state_dict(masked(model))
    state["b.weight"] = state.pop("a.weight")
    assert list(masks.load_state_dict(model, state)) == ["a.weight"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"pattern": "5:4"}, "layer `0.weight`: the saved mask is malformed\n  got +the pattern '5:4'"),
        ({"shape": (16, 36)}, r"malformed\n  got +bits \(16, 4\) of torch.uint8"),
        ({"shape": (16, 30)}, "layer `0.weight`: the mask does not fit the weight"),
        ({"bits": torch.full((16, 4), 255, dtype=torch.uint8)}, "layer `0.weight`: the mask is not 2:4"),
        ({"bits": None}, "malformed"),
    ],
    ids=["pattern", "bits", "shape", "illegal", "type"],
)
def test_a_damaged_entry_changes_nothing(damage: dict[str, object], message: str) -> None:
    torch.manual_seed(0)
    model, state = masked(network()), masks.state_dict(masked(network()))
    before = keeps(model)
    with pytest.raises(MaskError, match=message):
        masks.load_state_dict(model, {**state, "0.weight": {**state["0.weight"], **damage}})
    assert same(keeps(model), before)


def test_a_state_of_another_model_changes_nothing() -> None:
    torch.manual_seed(0)
    model, state = masked(network()), masks.state_dict(masked(network()))
    before = keeps(model)
    with pytest.raises(
        MaskError, match=r"layer `1.wait`: .*the model lacks\n  got +`1.wait`\n.*\n  try +nearest names: `1.weight`"
    ):
        masks.load_state_dict(model, {**state, "1.wait": state["1.weight"]})
    with pytest.raises(MaskError, match=r"the model has masks that the checkpoint lacks\n  got +1.weight, 2.weight"):
        masks.load_state_dict(model, {"0.weight": state["0.weight"]})
    with pytest.raises(MaskError, match=r"layer `0.weight`: the saved mask is malformed"):
        masks.load_state_dict(model, {"0.weight": 3})
    assert same(keeps(model), before)


def test_masks_are_derived_from_sparse_weights() -> None:
    model, plain = masked(network()), network()
    plain.load_state_dict(model.state_dict())
    found = masks.derive(plain, "2:4")
    assert same({name: mask.keep for name, mask in found.items()}, keeps(model))


def test_where_a_kept_value_is_zero_the_lowest_index_is_kept() -> None:
    layer = nn.Linear(16, 8)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, 3] = 1.0
        layer.weight[0, 6] = -2.0
        layer.weight[0, 5] = -0.0
    keep = masks.derive(layer, NM(2, 4))["weight"].keep
    assert keep[0, :8].tolist() == [True, False, False, True, True, False, True, False]
    assert keep[1, :4].tolist() == [True, True, False, False]


def test_weights_that_are_not_sparse_are_refused_with_their_first_group() -> None:
    model = masked(network())
    with torch.no_grad():
        model[0].weight[3, 8:12] = torch.tensor([1.0, 0.0, 2.0, 3.0])
        model[1].weight[2, 4:8, 1, 2] = 1.0
    masks.detach(model)
    with pytest.raises(MaskError) as caught:
        masks.derive(model, "2:4")
    assert "`0.weight` is not 2:4: group at (3, 8) holds (1.0, 0.0, 2.0, 3.0)" in str(caught.value)
    assert "`1.weight` is not 2:4: group at (2, 1, 2, 4) holds (1.0, 1.0, 1.0, 1.0)" in str(caught.value)
    assert masks.of(model) == {}
    assert list(masks.derive(model, "2:4", skip=["0", "1"])) == ["2.weight"]


def test_a_recipe_says_where_to_derive() -> None:
    recipe = Recipe.parse({"0": "1:4", "1": "dense", "*": "2:4"}, skip=["3"], eligibility="any")
    model = nn.Sequential(*network(), nn.Linear(16, 16), nn.Linear(8, 3), nn.Linear(6, 4))
    pruned = twofour.prune(model, recipe)
    expected = keeps(pruned)
    assert list(expected) == ["0.weight", "2.weight", "4.weight"]
    masks.detach(pruned)
    assert same({name: mask.keep for name, mask in masks.derive(pruned, recipe).items()}, expected)
    masks.detach(pruned)
    assert list(masks.derive(pruned, recipe, skip="4")) == ["0.weight", "2.weight"]


@pytest.mark.parametrize("layer", ["a", "b"])
def test_a_recipe_may_name_a_tied_layer_by_any_of_its_names(layer: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    model["b"].weight = model["a"].weight
    recipe = Recipe.parse({layer: "2:4"})
    twofour.prune(model, recipe)
    pruned = keeps(model)
    masks.detach(model)
    assert {name: mask.keep.tolist() for name, mask in masks.derive(model, recipe).items()} == {
        name: keep.tolist() for name, keep in pruned.items()
    }


def test_a_model_without_eligible_weights_has_no_masks_to_derive() -> None:
    with pytest.raises(MaskError, match="no weight of the model is eligible"):
        masks.derive(nn.Linear(10, 10), "2:4")


def test_weights_with_nan_cannot_be_derived_from() -> None:
    layer = masked(nn.Linear(32, 32))
    masks.detach(layer)
    with torch.no_grad():
        layer.weight[layer.weight != 0] = float("nan")
    with pytest.raises(PatternError, match="layer `weight`: "):
        masks.derive(layer, "2:4")


@pytest.mark.parametrize("assign", [False, True])
def test_loading_weights_that_keep_the_mask_keeps_it(assign: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = masked(network())
    before = keeps(model)
    state = {name: value * 2 for name, value in model.state_dict().items()}
    state["0.weight"][0] = 0  # a kept value may become 0
    with caplog.at_level(logging.INFO, "twofour.masks"):
        model.load_state_dict(state, assign=assign)
    assert same(keeps(model), before) and not caplog.records


@pytest.mark.parametrize("assign", [False, True])
def test_loading_another_sparse_model_brings_its_masks(assign: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, other = masked(network()), masked(network())
    with caplog.at_level(logging.INFO, "twofour.masks"):
        model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=assign)
    assert same(keeps(model), keeps(other))
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3
    assert torch.equal(model[1].weight, other[1].weight)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_dense_weights_masks_them_again_and_says_so(assign: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = masked(network())
    before, dense = keeps(model), network().state_dict()
    expected = {name: torch.where(keep, dense[name], 0.0) for name, keep in before.items()}
    with caplog.at_level(logging.INFO, "twofour.masks"):
        model.load_state_dict(dense, assign=assign)
    assert same(keeps(model), before)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    assert [record.getMessage() for record in caplog.records] == [
        f"`{name}`: the loaded weight is not 2:4; its mask was applied again" for name in before
    ]


def test_loading_nan_into_other_places_names_the_weight() -> None:
    layer = masked(nn.Linear(32, 32))
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    state["weight"] = torch.where(masks.of(layer)["weight"].keep, 0.0, float("nan"))
    with pytest.raises(PatternError, match="layer `weight`: "):
        layer.load_state_dict(state)


def test_a_weight_assigned_by_a_load_is_kept_sparse_by_the_next_step() -> None:
    layer = masked(nn.Linear(32, 32))
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    assert (layer.weight == 0).float().mean() == 0.5


def test_a_detached_model_loads_dense_weights_untouched() -> None:
    model, dense = masked(network()), network().state_dict()
    masks.detach(model)
    model.load_state_dict(dense)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in dense.items())


def test_weights_in_place_of_masks_are_refused_and_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(MaskError, match=r"a Tensor in place of a mask[\s\S]*weights, not masks"):
        masks.load_state_dict(model, model.state_dict())
    assert not masks.of(model)
