"""Where a masked parameter stands: moved, tied, untied, lost; and whose step says so."""

import copy
import io
import logging

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import twofour
from tests.turns import in_turn
from twofour import masks
from twofour.errors import MaskError
from twofour.masks import stepped


def layer() -> nn.Linear:
    return nn.Linear(32, 32)


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Step with gradients that are nowhere zero, so that every value is written."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def half(weight: torch.Tensor) -> bool:
    return bool((weight == 0).float().mean() == 0.5)


def test_a_parameter_that_moves_takes_its_mask_along() -> None:
    old = twofour.prune(nn.Sequential(layer()), "2:4")
    model = nn.Sequential(layer())
    model[0].weight = old[0].weight
    del old
    step(model)
    assert half(model[0].weight)
    assert list(masks.of(model)) == ["0.weight"] and twofour.check(model).ok
    other = copy.deepcopy(model)
    step(other)
    assert half(other[0].weight) and half(model[0].weight)


def test_a_parameter_that_moves_unseen_is_kept_sparse_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    old = twofour.prune(nn.Sequential(layer()), "2:4")
    model = nn.Sequential(layer())
    model[0]._parameters["weight"] = old[0].weight
    del old
    for _ in range(2):
        step(model)
    assert half(model[0].weight)
    assert caplog.text.count("`0.weight`: the parameter has left the module that it was masked in") == 1
    model[0].weight = model[0].weight
    assert list(masks.of(model)) == ["0.weight"]


def test_an_optimizer_that_steps_what_a_module_has_replaced_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = twofour.prune(nn.Sequential(layer()), "2:4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    model[0].weight = nn.Parameter(torch.randn(32, 32))
    step(model, optimizer)
    assert "build the optimiser anew" in caplog.text
    step(model)
    assert half(model[0].weight)


def test_the_mask_comes_along_when_two_modules_exchange_their_weights() -> None:
    model = twofour.prune(nn.Sequential(layer(), layer()), "2:4")
    zeros = [each.weight == 0 for each in model]
    model[0].weight, model[1].weight = model[1].weight, model[0].weight
    step(model)
    assert torch.equal(model[0].weight == 0, zeros[1]) and torch.equal(model[1].weight == 0, zeros[0])


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("after", [False, True], ids=["tied-before", "tied-after"])
def test_an_untied_weight_is_masked_by_itself(place: int, after: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(layer(), layer())
    if not after:
        model[1].weight = model[0].weight
    twofour.prune(model[0] if after else model, "2:4")
    model[1].weight = model[0].weight
    assert len(masks.of(model)) == 1
    model[place].weight = nn.Parameter(torch.randn(32, 32))
    step(model)
    assert half(model[0].weight) and half(model[1].weight) and model[0].weight is not model[1].weight
    assert "is no longer the same parameter as" in caplog.text
    keep = [mask.keep for mask in masks.of(model).values()]
    assert len(keep) == 2 and torch.equal(*keep) and keep[0] is not keep[1]


def test_tied_weights_that_a_load_unties_follow_their_own_zeros() -> None:
    model = nn.Sequential(layer(), layer())
    model[1].weight = model[0].weight
    twofour.prune(model, "2:4")
    others = twofour.prune(nn.Sequential(layer(), layer()), "2:4")
    model.load_state_dict(copy.deepcopy(others.state_dict()), assign=True)
    for name, mask in masks.of(model).items():
        assert torch.equal(mask.keep, masks.of(others)[name].keep)


def test_an_embedding_that_is_untied_from_a_masked_head_is_dense() -> None:
    model = nn.ModuleDict({"rows": nn.Embedding(32, 32), "head": nn.Linear(32, 32, bias=False)})
    model["head"].weight = model["rows"].weight
    twofour.prune(model, {"head": "2:4"})
    model["rows"].weight = nn.Parameter(torch.randn(32, 32))
    step(model)
    assert half(model["head"].weight) and (model["rows"].weight != 0).all()


def test_a_shallow_copy_stays_masked_when_the_original_is_gone() -> None:
    model = twofour.prune(layer(), "2:4")
    other = copy.copy(model)
    del model
    assert list(masks.of(other)) == ["weight"]
    step(other)
    assert half(other.weight)


def test_two_parameters_that_are_swapped_take_their_masks_along() -> None:
    model = twofour.prune(nn.Sequential(layer(), layer()), "2:4")
    zeros = [each.weight == 0 for each in model]
    torch.utils.swap_tensors(model[0].weight, model[1].weight)
    step(model)
    assert torch.equal(model[0].weight == 0, zeros[1]) and torch.equal(model[1].weight == 0, zeros[0])


def test_a_masked_parameter_by_itself_is_read_without_pickled_code() -> None:
    model, file = twofour.prune(layer(), "2:4"), io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert torch.equal(found["weight"], model.weight)
    other = nn.Sequential(layer())
    other[0].weight = found["weight"]
    assert not masks.of(other), "what is read from a file promises nothing"


def test_detached_weights_are_let_go_wherever_they_went() -> None:
    old = twofour.prune(nn.Sequential(layer(), layer()), "2:4")
    model = nn.Sequential(layer(), layer())
    model[0]._parameters["weight"], model[1].weight = old[0].weight, old[1].weight
    masks.detach(model)
    del old
    step(model)
    assert all((each.weight != 0).all() for each in model) and not masks.of(model)


def lose(module: nn.Module, how: str) -> None:
    if how == "weight_norm":
        torch.nn.utils.parametrizations.weight_norm(module)
    elif how == "old weight_norm":
        torch.nn.utils.weight_norm(module)
    elif how == "parametrized":
        torch.nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())
    elif how == "pruned by torch":
        torch.nn.utils.prune.l1_unstructured(module, "weight", 0.25)
    else:
        module.weight = None if how == "removed" else nn.Parameter(torch.randn(16, 32))


LOST = ("weight_norm", "old weight_norm", "parametrized", "pruned by torch", "removed", "another shape")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@in_turn("stepped_before", [False, True])
@in_turn("how", LOST)
def test_a_lost_weight_is_refused_in_its_own_models_step_alone(how: str, stepped_before: bool) -> None:
    lost, other, dense = twofour.prune(nn.Sequential(layer()), "2:4"), twofour.prune(layer(), "2:4"), layer()
    optimizer = torch.optim.SGD(lost.parameters(), lr=0.1)
    if stepped_before:
        step(lost, optimizer)
    weight = lost[0].weight
    lose(lost[0], how)
    step(dense)
    step(other)
    assert half(other.weight)
    wanted = "different shapes" if how == "another shape" else "`0.weight` can no longer be kept 2:4"
    for stale in (optimizer, torch.optim.SGD(lost.parameters(), lr=0.1), torch.optim.SGD([weight], lr=0.1)):
        for _ in range(2):
            with pytest.raises(MaskError, match=wanted):
                step(lost, stale)
    masks.detach(lost)
    step(lost)


def test_an_optimizer_over_several_models_is_refused_if_one_is_broken() -> None:
    models = nn.ModuleList(twofour.prune(layer(), "2:4") for _ in range(3))
    torch.nn.utils.parametrizations.weight_norm(models[1])
    with pytest.raises(MaskError, match="can no longer be kept"):
        step(models)
    step(models[0])
    assert half(models[0].weight)


def test_a_step_without_masked_parameters_looks_at_no_masked_model(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    living = stepped.living
    monkeypatch.setattr(stepped, "living", lambda: walks.append(1) or living())
    others = [twofour.prune(layer(), "2:4") for _ in range(20)]
    dense, masked = layer(), others[0]
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (dense, masked))
    for _ in range(10):
        step(dense, first)
        step(masked, second)
    assert len(walks) == 2, "one walk for each optimiser, at its first step"
    others.append(twofour.prune(layer(), "2:4"))
    for _ in range(10):
        step(dense, first)
    assert len(walks) == 3, "one more after a model was masked"
    assert not dense.weight.__dict__ and not any("twofour" in name for name in dense.__dict__)


@pytest.mark.parametrize("change", ["assigned", "in place", "group", "assigned before it stood in a masked place"])
def test_what_an_optimizer_steps_is_looked_up_again_after_a_change(change: str) -> None:
    model = twofour.prune(nn.Sequential(layer()), "2:4")
    fresh = nn.Parameter(torch.randn(32, 32))
    optimizer = torch.optim.SGD([fresh] if "before" in change else model.parameters(), lr=0.1)
    step(model, optimizer)
    if change == "assigned":
        model[0].weight = fresh
        optimizer.param_groups[0]["params"] = list(model.parameters())
    elif change == "in place":
        model[0].weight = fresh
        optimizer.param_groups[0]["params"][0] = fresh
    elif change == "group":
        model[0].weight = fresh
        optimizer.add_param_group({"params": [fresh]})
    else:
        fresh.grad = torch.ones_like(fresh)
        optimizer.step()
        model[0].weight = fresh
    step(model, optimizer)
    assert model[0].weight is fresh and half(fresh)


def test_a_weight_that_was_written_before_its_first_step_brings_its_zeros_or_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, other = (twofour.prune(layer(), "2:4") for _ in range(2))
    zeros = other.weight == 0
    with torch.no_grad():
        model.weight.copy_(other.weight)
    with caplog.at_level(logging.INFO, "twofour.masks"):
        step(model)
    assert torch.equal(model.weight == 0, zeros) and "its mask follows" in caplog.text
    with torch.no_grad():
        model.weight.fill_(1.0)
    step(model)
    assert torch.equal(model.weight == 0, zeros) and "its mask was applied again" in caplog.text
