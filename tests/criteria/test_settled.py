"""Weights whose zeros obey the pattern asked for: they keep their values, and nothing is run for them."""

import pytest
import torch
from torch import nn

import twofour
from tests.turns import in_turn
from twofour import masks, pruning
from twofour.errors import DataError, RecipeError


@in_turn("pattern", ["2:4", "1:4", "2:4+25%", "block:8x8@0.5", "4:8"])
@in_turn("criterion", ["auto", "admm", "sparsegpt", "wanda", "random", "magnitude"])
def test_weights_that_obey_their_pattern_keep_their_values(pattern: str, criterion: str, caplog) -> None:
    """Masked or not; nothing runs: neither the data are read nor anything reconstructed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    first = "2:4" if pattern == "4:8" else pattern
    twofour.prune(model, first, data=[torch.randn(256, 64)], criterion="sparsegpt")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = {name: mask.keep.clone() for name, mask in masks.of(model).items()}
    for masked in (True, False):
        if not masked:
            masks.detach(model)
        caplog.clear()
        twofour.prune(model, pattern, criterion=criterion, data=unread())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert "`0.weight` and 1 more: pruned already" in caplog.text and "values are left" in caplog.text
        assert [outcome.criterion for outcome in twofour.pruning.outcomes(model)] == ["left", "left"]
        assert twofour.pruning.reconstruction_report(model) is None and twofour.check(model).ok
        if masked and first == pattern:
            assert all(torch.equal(mask.keep, kept[name]) for name, mask in masks.of(model).items())


def unread():
    """Data that nobody may look at."""
    raise AssertionError("the data were read")
    yield


def test_beside_new_ones_a_pruned_weight_keeps_its_values() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    data = [torch.randn(256, 64)]
    twofour.prune(model, {"0": "2:4", "*": "dense"}, data=data)
    before = model[0].weight.detach().clone()
    twofour.prune(model, "2:4", data=data)
    assert torch.equal(model[0].weight, before) and twofour.check(model).ok and len(masks.of(model)) == 2
    by = {outcome.name: outcome.criterion for outcome in twofour.pruning.outcomes(model)}
    assert by == {"0.weight": "left", "2.weight": "admm"}


def settled_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    return twofour.prune(model, "2:4", data=[torch.randn(256, 64)], permute=True, criterion="admm", reconstruct=True)


@in_turn(
    ("options", "error", "said"),
    [
        ({"data": 5}, DataError, "int"),
        ({"data": "text"}, DataError, "str of 4"),
        ({"data": [torch.randn(8, 64)], "samples": -3}, DataError, "samples=-3"),
        ({"criterion": "magnitude", "samples": 0}, DataError, "samples=0"),
        ({"reconstruct": "yes"}, RecipeError, "'yes'"),
        ({"data": [torch.randn(256, 64)], "reconstruct": True}, RecipeError, r"whose weights \(2\) obey"),
        ({"reconstruct": True, "criterion": "magnitude"}, RecipeError, "the dense model's answers, and it is gone"),
    ],
)
def test_what_cannot_be_used_is_refused_where_nothing_is_left_to_prune(options, error, said) -> None:
    model = settled_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=said):
        twofour.prune(model, "2:4", progress=False, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_was_won_is_told_still_after_a_pruning_that_changed_nothing() -> None:
    model = settled_model()
    reports = pruning.permutation_report(model), pruning.reconstruction_report(model)
    assert None not in reports
    twofour.prune(model, "2:4", criterion="magnitude")
    assert (pruning.permutation_report(model), pruning.reconstruction_report(model)) == reports


@in_turn("pattern", ["2:4", "2:4+25%", "4:8-pairs", "block:8x8@0.5"])
@in_turn("criterion", ["auto", "sparsegpt", "wanda", "random", "magnitude"])
def test_a_weight_that_was_made_of_zeros_is_no_pruned_one(pattern: str, criterion: str, caplog) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    nn.init.zeros_(model[1].weight)
    caplog.clear()
    twofour.prune(model, pattern, criterion=criterion, data=[torch.randn(256, 64)], reconstruct=False)
    assert "already" not in caplog.text and "gone" not in caplog.text
    assert not model[1].weight.any() and twofour.check(model).ok
    assert "left" not in [outcome.criterion for outcome in pruning.outcomes(model)]
    kept = {name: mask.keep.clone() for name, mask in masks.of(model).items()}
    twofour.prune(model, pattern, criterion=criterion, data=unread())  # a mask of zeros is one
    assert {outcome.criterion for outcome in pruning.outcomes(model)} == {"left"}
    assert all(torch.equal(mask.keep, kept[name]) for name, mask in masks.of(model).items())


def test_the_mask_of_zeros_is_the_criterions() -> None:
    model = nn.Linear(64, 64)
    nn.init.zeros_(model.weight)
    twofour.prune(model, "2:4", criterion="random")
    assert len(masks.of(model)["weight"].keep.view(-1, 4).unique(dim=0)) == 6
