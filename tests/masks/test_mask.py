"""Attach, list, detach, enforce; what is refused and how it says so."""

import copy
import gc
import io
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from twofour import layers, masks, patterns
from twofour.errors import MaskError
from twofour.masks.rule import fill_pruned
from twofour.patterns import NM


def prunable(layer: nn.Module) -> layers.PrunableWeight:
    (weight,) = layers.walk(layer).weights
    return weight


def magnitude(weight: layers.PrunableWeight, pattern: patterns.Pattern | None = None) -> torch.Tensor:
    chosen = pattern or NM(2, 4)
    return weight.from_reduction_last(chosen.project(weight.reduction_last(weight.parameter.detach()), absolute=True))


def masked(layer: nn.Module) -> nn.Module:
    masks.attach(prunable(layer), magnitude(prunable(layer)), "2:4")
    return layer


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()


def test_a_mask_is_no_part_of_the_state_dict() -> None:
    layer = nn.Linear(32, 32)
    keys, dense = list(layer.state_dict()), layer.weight.detach().clone()
    weight = prunable(layer)
    keep = magnitude(weight)
    mask = masks.attach(weight, keep, "2:4")
    assert (mask.name, mask.layer, mask.attribute, mask.pattern) == ("weight", "", "weight", NM(2, 4))
    assert mask.keep is not keep and torch.equal(mask.keep, keep) and mask.density == 0.5
    assert list(layer.state_dict()) == keys
    assert torch.equal(layer.weight, torch.where(keep, dense, 0.0))
    assert type(layer) is nn.Linear and "forward" not in layer.__dict__


def test_masks_follow_the_names_of_the_model() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Sequential(nn.Conv1d(16, 8, 3))})
    for weight in layers.walk(model).weights:
        masks.attach(weight, magnitude(weight), NM(2, 4))
    assert list(masks.of(model)) == ["a.weight", "b.0.weight"]
    assert list(masks.of(model["b"])) == ["0.weight"]
    assert masks.of(nn.Linear(4, 4)) == {}


def test_attaching_again_replaces_the_mask() -> None:
    layer = masked(nn.Linear(32, 32))
    weight = prunable(layer)
    first = masks.of(layer)["weight"]
    keep = torch.zeros(32, 32, dtype=torch.bool)
    keep[:, ::4] = True
    masks.attach(weight, keep, "1:4")
    assert masks.of(layer)["weight"].pattern == NM(1, 4)
    assert torch.equal(first.keep, keep), "a Mask handed out earlier shows the mask in force"
    train(layer)
    assert (layer.weight[~keep] == 0).all()


def test_detach_lets_the_weights_go() -> None:
    layer = masked(nn.Linear(32, 32))
    zeros = layer.weight == 0
    masks.detach(layer)
    assert masks.of(layer) == {} and not dict(layer.named_buffers()) and not layer._load_state_dict_post_hooks
    assert torch.equal(layer.weight == 0, zeros)
    train(layer)
    assert (layer.weight != 0).all()
    masked(layer)
    train(layer)
    assert (layer.weight == 0).float().mean() == 0.5


def test_detaching_one_model_leaves_its_copy_alone() -> None:
    layer = masked(nn.Linear(32, 32))
    other = copy.deepcopy(layer)
    masks.detach(layer)
    train(other)
    assert (other.weight == 0).float().mean() == 0.5


def test_enforce_masks_weights_and_gradients_by_hand() -> None:
    layer = masked(nn.Linear(32, 32))
    keep = masks.of(layer)["weight"].keep
    layer(torch.randn(4, 32)).square().mean().backward()
    with torch.no_grad():
        layer.weight.add_(layer.weight.grad, alpha=-0.1)
    layer.weight.grad[0].fill_(float("inf"))
    assert (layer.weight != 0).float().mean() > 0.9
    masks.enforce(layer)
    assert (layer.weight[~keep] == 0).all() and (layer.weight.grad[~keep] == 0).all()
    assert torch.isinf(layer.weight.grad[0][keep[0]]).all()


def test_masks_follow_a_cast_of_the_model() -> None:
    layer = masked(nn.Linear(32, 32)).to(torch.float64)
    assert masks.of(layer)["weight"].keep.dtype == torch.bool
    layer.type(torch.float32)
    train(layer)
    assert (layer.weight == 0).float().mean() == 0.5


def test_a_dropped_model_is_freed_at_once() -> None:
    gc.disable()
    try:
        layer = masked(nn.Linear(32, 32))
        gone = weakref.ref(layer)
        del layer
        assert gone() is None
    finally:
        gc.enable()


def test_a_shared_module_and_a_tied_weight_have_one_mask() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    model.append(model[2])
    found = layers.walk(model).weights
    assert [(weight.name, weight.aliases) for weight in found] == [
        ("0.weight", ("1.weight",)),
        ("2.weight", ("3.weight",)),
    ]
    for weight in found:
        masks.attach(weight, magnitude(weight), "2:4")
    assert list(masks.of(model)) == ["0.weight", "2.weight"]
    train(model)
    assert (model[1].weight == 0).float().mean() == (model[3].weight == 0).float().mean() == 0.5
    other = copy.deepcopy(model)
    train(other)
    assert (other[1].weight == 0).float().mean() == 0.5 and other[1].weight is other[0].weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda keep: keep.float(),
            r"layer `weight`: the mask does not fit.*\n  got +mask \(32, 32\) of torch.fl",
        ),
        (lambda keep: keep[:16], r"got +mask \(16, 32\) of torch.bool, weight \(32, 32\)"),
        (lambda keep: keep.to("meta"), r"different devices\n  got +mask on meta, weight on cpu"),
        (lambda keep: keep.t().contiguous(), r"not 2:4 along the reduction axis\n  got +the group at \(\d+, \d+\)"),
        (torch.ones_like, r"\(0, 0\) of \(out, \[spatial\], in\) keeps \(1, 1, 1, 1\); 256 of 256 groups"),
    ],
    ids=["float", "shape", "device", "wrong-axis", "dense"],
)
def test_a_mask_that_does_not_fit_changes_nothing(change, message: str) -> None:
    torch.manual_seed(3)
    layer = nn.Linear(32, 32)
    dense = layer.weight.detach().clone()
    weight = prunable(layer)
    with pytest.raises(MaskError, match=message):
        masks.attach(weight, change(magnitude(weight)), "2:4")
    assert torch.equal(layer.weight, dense) and masks.of(layer) == {}


def test_several_masks_are_attached_together_or_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    first, second = layers.walk(model).weights
    with pytest.raises(MaskError, match=r"1\.weight"):
        masks.attach_all([(first, magnitude(first), "2:4"), (second, ~magnitude(second)[:, :4], "2:4")])
    assert (model[0].weight != 0).all() and masks.of(model) == {}


def test_a_buffer_of_the_models_own_is_left_alone() -> None:
    layer = nn.Linear(32, 32)
    layer.register_buffer("weight_mask", torch.ones(32, 32))
    train(masked(layer))
    assert (layer.weight == 0).float().mean() == 0.5 and (layer.weight_mask == 1).all()


def test_a_parametrisation_after_pruning_is_refused_at_the_next_step() -> None:
    layer = masked(nn.Linear(32, 32))
    torch.nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(MaskError, match="`weight` can no longer be kept 2:4: its module has no parameter `weight`"):
        train(layer)
    masks.detach(layer)
    train(layer)


def test_a_weight_of_another_shape_is_refused_at_the_next_step() -> None:
    layer = masked(nn.Linear(32, 32))
    layer.weight = nn.Parameter(torch.randn(16, 32))
    layer.bias = None
    with pytest.raises(MaskError, match=r"different shapes\n  got +weight \(16, 32\), mask \(32, 32\)"):
        train(layer)


@pytest.mark.parametrize("how", ["deepcopy", "deepcopy-twice", "pickle"])
def test_a_copy_is_masked_by_itself(how: str) -> None:
    layer = masked(nn.Linear(32, 32))
    before = layer.weight.detach().clone()
    if how == "pickle":
        file = io.BytesIO()
        torch.save(nn.Sequential(layer), file)
        file.seek(0)
        other = torch.load(file, weights_only=False)[0]
    else:
        other = copy.deepcopy(copy.deepcopy(layer) if how == "deepcopy-twice" else layer)
    assert torch.equal(masks.of(other)["weight"].keep, masks.of(layer)["weight"].keep)
    assert masks.of(other)["weight"].keep is not masks.of(layer)["weight"].keep and list(other.state_dict()) == list(
        layer.state_dict()
    )
    train(other)
    assert torch.equal(layer.weight, before), "the original was not trained"
    assert torch.equal(other.weight == 0, before == 0)
    assert (other.weight != before).float().mean() == 0.5


def test_a_process_that_only_unpickles_keeps_the_mask_too(tmp_path: Path) -> None:
    torch.save(masked(nn.Linear(32, 32)), tmp_path / "model.pt")
    code = f"""
import torch
from twofour import masks
model = torch.load({os.fspath(tmp_path / "model.pt")!r}, weights_only=False)
model(torch.randn(4, 32)).square().mean().backward()
torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1).step()
assert (model.weight[~masks.of(model)["weight"].keep] == 0).all() and (model.weight == 0).float().mean() == 0.5
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_copied_optimizer_trains_the_copied_model() -> None:
    model = masked(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    model, optimizer = copy.deepcopy((model, optimizer))
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    pruned = ~masks.of(model)["weight"].keep
    assert (model.weight[pruned] == 0).all()
    assert (optimizer.state[model.weight]["momentum_buffer"][pruned] == 0).all()


def test_a_mask_of_another_shape_is_broadcast_or_refused_and_reads_nothing_beyond_it() -> None:
    tensor = torch.full((3, 4), -1.0)
    fill_pruned(tensor, torch.tensor([True, False, False, True]))
    assert torch.equal(tensor, torch.tensor([-1.0, 0, 0, -1]).expand(3, 4))
    with pytest.raises(RuntimeError, match="must match"):
        fill_pruned(tensor, torch.ones(2, 6, dtype=torch.bool))
