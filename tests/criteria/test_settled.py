"""Weights whose zeros obey the pattern asked for: they keep their values, and nothing is run for them."""

import torch
from torch import nn

import twofour
from tests.turns import in_turn
from twofour import masks


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
