"""Code that knows nothing of masks: averages, meta tensors, functional calls, and steps that no hook sees."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import twofour
from twofour import masks
from twofour.errors import ExportError, PackingError


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))


def train(model: nn.Module, average: AveragedModel | None = None, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(model)


def zeros(model: nn.Module) -> list[torch.Tensor]:
    return [parameter == 0 for parameter in model.parameters() if parameter.ndim == 2]


@pytest.mark.parametrize("buffers", [False, True], ids=["parameters", "buffers too"])
@pytest.mark.parametrize("average_of", [None, get_ema_multi_avg_fn(0.5)], ids=["swa", "ema"])
def test_an_average_begun_after_pruning_has_the_zeros_of_the_model(average_of, buffers: bool) -> None:
    model = twofour.prune(network(), "2:4")
    average = AveragedModel(model, use_buffers=buffers, multi_avg_fn=average_of)
    train(model, average)
    assert all(torch.equal(*pair) for pair in zip(zeros(average.module), zeros(model), strict=True))
    assert twofour.check(average.module).ok and len(masks.of(average.module)) == 2
    assert not torch.equal(average.module[0].weight, model[0].weight)


@pytest.mark.parametrize("buffers", [False, True], ids=["parameters", "buffers too"])
@pytest.mark.parametrize("average_of", [None, get_ema_multi_avg_fn(0.5)], ids=["swa", "ema"])
def test_an_average_begun_before_pruning_is_dense_until_it_is_given_the_masks(average_of, buffers: bool) -> None:
    model = network()
    average = AveragedModel(model, use_buffers=buffers, multi_avg_fn=average_of)
    train(model, average)
    twofour.prune(model, "2:4")
    train(model, average)
    assert not masks.of(average.module) and not zeros(average.module)[0].any()
    masks.load_state_dict(average.module, masks.state_dict(model))
    train(model, average)
    assert all(torch.equal(*pair) for pair in zip(zeros(average.module), zeros(model), strict=True))
    assert twofour.check(average.module).ok


def test_a_mask_is_no_buffer() -> None:
    model = network()
    names, tensors = [name for name, _ in model.named_buffers()], dict(model.named_buffers())
    twofour.prune(model, "2:4")
    assert [name for name, _ in model.named_buffers()] == names
    x = torch.randn(8, 32)
    assert torch.equal(torch.func.functional_call(model, {**dict(model.named_parameters()), **tensors}, (x,)), model(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_masks_survive_a_model_without_values(sparse: bool, assign: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = twofour.prune(network(), "2:4")
    kept = [mask.keep.clone() for mask in masks.of(model).values()]
    state = copy.deepcopy(model.state_dict()) if sparse else network().state_dict()
    model = model.to("meta")
    if not assign:
        model = model.to_empty(device="cpu")
    model.load_state_dict(state, assign=assign)
    assert twofour.check(model).ok
    assert all(torch.equal(mask.keep, keep) for mask, keep in zip(masks.of(model).values(), kept, strict=True))
    assert caplog.text.count("its mask was applied again") == (0 if sparse else 2)
    train(model)
    assert all(torch.equal(zero, ~keep) for zero, keep in zip(zeros(model), kept, strict=True))


def test_values_that_are_written_after_to_empty_are_masked_by_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    model = twofour.prune(network(), "2:4").to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    assert not twofour.check(model).ok
    train(model)
    assert twofour.check(model).ok and caplog.text.count("its mask was applied again") == 2


def functional(model: nn.Module) -> None:
    parameters = dict(model.eval().named_parameters())
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (torch.randn(8, 32),)).sum())(parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(parameter - 0.1 * grads[name] - 0.1)


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1)


def master_copies(model: nn.Module) -> None:
    masters = [parameter.detach().double() for parameter in model.parameters()]
    for master in masters:
        master.grad = torch.ones_like(master)
    torch.optim.SGD(masters, lr=0.1).step()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.copy_(master)


def no_optimizer_of_torch(model: nn.Module) -> None:
    class Own:
        def step(self) -> None:
            by_hand(model)

    Own().step()


def replaced_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda closure=None: by_hand(model)  # type: ignore[method-assign]
    optimizer.step()


@pytest.mark.parametrize("update", [functional, by_hand, master_copies, no_optimizer_of_torch, replaced_step])
def test_what_no_hook_sees_is_found_before_it_leaves(update: Callable[[nn.Module], None], tmp_path: Path) -> None:
    model = twofour.prune(network(), "2:4")
    update(model)
    assert (model[0].weight != 0).float().mean() > 0.9
    report = twofour.check(model)
    assert not report.ok and "2:4 broken" in str(report)
    with pytest.raises(PackingError, match=r"`0.weight`: the weight does not obey 2:4[\s\S]*masks.enforce"):
        twofour.save(model, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match=r"`0.weight`: the weight is not 2:4[\s\S]*masks.enforce"):
        twofour.export.to_safetensors(model, tmp_path / "model.safetensors")
    assert "dense: not 2:4, 256 of 256 groups" in str(
        twofour.compile(model, torch.randn(4, 32), tokens=(4,), graph=False).plan
    )
    masks.enforce(model)
    assert twofour.check(model).ok
