"""Kept values that are saved, loaded, copied and written to: what is shown is dense, training goes on either way."""

import contextlib
import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import nn

import twofour
from tests.training.kept_values import OPTIMIZERS, PATTERN, assert_same, attach, batch, losses, network, pair
from twofour import masks, prune
from twofour.errors import FormatError, TrainingError
from twofour.training import both_ways, finetune


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_what_is_saved_is_dense_and_goes_on_either_way(order: tuple[int, ...]) -> None:
    """Killed after three steps and resumed, packed or dense: the bits of six steps without a stop."""
    whole = network()
    kept_alive = attach(whole)
    optimizer = OPTIMIZERS["adamw"](whole.parameters())
    want = losses(whole, optimizer, 0, 6)
    for before, after in (("packed", "packed"), ("packed", "dense"), ("dense", "packed")):
        model, other = network(), network(seed=5)
        handle, resumed = attach(model, before), attach(other, after)
        first, second = (OPTIMIZERS["adamw"](one.parameters()) for one in (model, other))
        found = losses(model, first, 0, 3)
        saved = pickle.loads(pickle.dumps((model.state_dict(), first.state_dict(), handle.state_dict())))
        assert saved[0]["0.weight"].shape == saved[1]["state"][0]["exp_avg"].shape == (64, 32)
        for part in order:
            (other, second, resumed)[part].load_state_dict(saved[part])
        found += losses(other, second, 3, 3)
        same = before == after  # else the weight gradient is summed in another order
        assert found == (want if same else pytest.approx(want, rel=1e-5)), (before, after)
        assert_same(whole, other, 0.0 if same else 1e-4)
    assert kept_alive.attached


@pytest.mark.parametrize("end", ["finish", "remove"])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_and_back_with_the_same_optimizer(end: str, masked: bool) -> None:
    models = network(), network()
    if masked:
        for model in models:
            prune(model, {"0": "2:4-transposable", "2": "2:4-transposable"})
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]  # before attach
    dense, packed = models
    handle, other = attach(dense, "dense"), attach(packed)
    assert not masks.of(packed) and {parameter.shape for parameter in packed[0].parameters()} == {(64, 16), (64,)}
    for model, optimizer in zip(models, optimizers, strict=True):
        losses(model, optimizer, 0, 3)
    assert getattr(other, end)() is packed and getattr(handle, end)() is dense
    assert type(packed[0]) is nn.Linear and packed[0].weight.shape == (64, 32)
    assert optimizers[1].state[packed[0].weight]["exp_avg"].shape == (64, 32)
    assert (
        set(masks.of(packed))
        == set(masks.of(dense))
        == ({"0.weight", "2.weight"} if masked or end == "finish" else set())
    )
    assert list(other.masks()) == ["0.weight", "2.weight"]
    after = [losses(model, optimizer, 3, 3) for model, optimizer in zip(models, optimizers, strict=True)]
    assert after[1] == pytest.approx(after[0], rel=1e-5)
    assert_same(dense, packed, 1e-5)
    if end == "finish":
        assert twofour.check(packed).ok


def test_dense_first_and_kept_values_from_a_step_on() -> None:
    dense, packed = pair(begin=2)
    found = [losses(model, OPTIMIZERS["sgd"](model.parameters()), 0, 5) for model in (dense, packed)]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert dict(packed.named_parameters())["0.weight"].shape == (64, 16)
    assert_same(dense, packed, 1e-5)


def test_loaded_weights_bring_their_zeros_and_state_follows() -> None:
    dense, packed = pair()
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in (dense, packed)]
    other = prune(network(seed=5), {"0": "2:4-transposable", "2": "2:4-transposable"})
    for model, optimizer in zip((dense, packed), optimizers, strict=True):
        losses(model, optimizer, 0, 2)
        model.load_state_dict(other.state_dict())
    want, have = (model.handle[0].masks() for model in (dense, packed))
    assert all(torch.equal(have[name], keep) for name, keep in want.items())
    assert torch.equal(packed[0].weight, other[0].weight)
    found = [losses(model, optimizer, 2, 3) for model, optimizer in zip((dense, packed), optimizers, strict=True)]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight: \(64, 16\) in the state dict, \(64, 32\)"):
        packed.load_state_dict({**packed.state_dict(), "0.weight": torch.zeros(64, 16)})


def test_copies_run_and_train_by_themselves() -> None:
    model = network()
    handle = attach(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(batch()), model(batch()))
        before = model.state_dict()
        losses(twin, torch.optim.SGD(twin.parameters(), 0.1), 0, 1)
        assert not torch.equal(twin[0].weight, model[0].weight) and PATTERN.check(twin[0].weight.detach()).ok
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert handle.remove() is model
    half = copy.deepcopy(network())
    attach(half)
    want = half(batch())
    assert torch.allclose(half.double()(batch().double()).float(), want, rtol=1e-4, atol=1e-5)


class Stop(Exception):
    pass


def test_finetune_killed_and_resumed_is_as_if_never_stopped(tmp_path) -> None:
    def run(folder, most: int) -> nn.Module:
        model, calls = network(), []

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) > most:
                raise Stop
            return nn.functional.mse_loss(output, target)

        loader = [(batch(seed), batch(seed)[:, :7].sin()) for seed in range(4)]
        with contextlib.suppress(Stop):
            finetune(
                model,
                loader,
                loss=loss,
                optimizer=OPTIMIZERS["adamw"],
                epochs=2,
                scheme=lambda given, steps: attach(given),
                clip_norm=0.5,
                checkpoint=folder,
                checkpoint_every=1,
                progress=False,
            )
        return model

    whole = run(None, 99)
    assert set(masks.of(whole)) == {"0.weight", "2.weight"} and type(whole[0]) is nn.Linear
    run(tmp_path, 5)
    stored = torch.load(tmp_path / "sparse.pt", weights_only=True)
    assert stored["model"]["0.weight"].shape == stored["optimizer"]["state"][0]["exp_avg"].shape == (64, 32)
    assert_same(whole, run(tmp_path, 99))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "dropped"])
@pytest.mark.parametrize(("state", "schedule"), [("packed", "fixed"), ("dense", "every=100")])
def test_fused_steps_are_seen_without_a_handle(how: str, state: str, schedule: str) -> None:
    """Fused optimisers write without counting the version of a parameter up, by which old layouts are known."""
    found = []
    for after in (False, True):
        model = network()
        handle = attach(model, state, schedule=schedule, decay=0.0)
        if after:
            if how == "dropped":
                del handle
                gc.collect()
            else:
                model = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        found.append(losses(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), 0, 4))
    assert found[1] == found[0]


def test_masks_that_a_copy_loads_take_momentum_along() -> None:
    found = []
    for copied in (False, True):
        model = network()
        handle = attach(model)
        if copied:
            model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        losses(model, optimizer, 0, 2)
        other = prune(network(seed=5), {"0": "2:4-transposable", "2": "2:4-transposable"})
        model.load_state_dict(other.state_dict())
        found.append(losses(model, optimizer, 2, 3))
        assert optimizer.state_dict()["state"][0]["momentum_buffer"].shape == (64, 32)
        assert handle.attached
    assert found[0] == found[1]


def test_a_copied_optimizer_does_not_guess_where_its_state_stands() -> None:
    model = network()
    handle = attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses(model, optimizer, 0, 1)
    other = prune(network(seed=5), {"0": "2:4-transposable", "2": "2:4-transposable"}).state_dict()
    twin, stepping = copy.deepcopy((model, optimizer))
    losses(twin, stepping, 1, 1)
    twin.load_state_dict(other)
    losses(twin, stepping, 2, 1)  # it has stepped where its values stood
    twin, stepping = copy.deepcopy((model, optimizer))
    twin.load_state_dict(other)
    with pytest.raises(TrainingError, match=r"(?s)is not known.*a copy of a SGD"):
        losses(twin, stepping, 1, 1)
    stepping.load_state_dict(optimizer.state_dict())
    losses(twin, stepping, 1, 1)
    assert handle.attached


def test_what_is_written_to_a_state_dict_reaches_the_kept_values() -> None:
    averages = []
    for model in pair():
        average = copy.deepcopy(model)
        shown = average.state_dict()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(3):
            losses(model, optimizer, step, 1)
            with torch.no_grad():
                for one, other in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                    one.lerp_(other, 0.5)  # kept by nobody
        with torch.no_grad():
            average.state_dict()["0.weight"].mul_(2)
        averages.append(copy.deepcopy(average))
        assert len(shown) == 5
    assert_same(*averages, limit=1e-6)
    assert torch.allclose(averages[0](batch()), averages[1](batch()), atol=1e-6)


def test_a_state_dict_of_before_is_not_written_through() -> None:
    model = network()
    handle = attach(model)
    shown = model.state_dict()
    losses(model, torch.optim.SGD(model.parameters(), 0.1), 0, 1)
    shown["0.weight"].mul_(2)
    with pytest.raises(TrainingError, match="written to after the weights had moved"):
        model(batch())
    model(batch())
    assert handle.attached


def test_weights_are_assigned_by_loading_alone() -> None:
    model = network()
    handle = attach(model)
    values = dict(model.named_parameters())["0.weight"]
    other = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(other, assign=True)
    assert dict(model.named_parameters())["0.weight"] is values
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
    want = model(batch())
    for change in (
        lambda: setattr(model[0], "weight", nn.Parameter(torch.zeros(64, 16))),
        lambda: nn.utils.parametrizations.weight_norm(model[0]),
        lambda: nn.utils.parametrizations.spectral_norm(model[0]),
        lambda: nn.utils.spectral_norm(model[0]),
        lambda: nn.utils.weight_norm(model[0]),
    ):
        said = pytest.raises(TrainingError, match="takes no other weight by assignment, parametrisation or weight norm")
        with said, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            change()
        assert torch.equal(model(batch()), want) and list(model[0].state_dict()) == ["weight", "bias"]
    model[2]._parameters["weight"] = nn.Parameter(torch.zeros(48, 32)[:, :8])
    with pytest.raises(TrainingError, match=r"layer `2.weight`: a layer no longer holds its kept values"):
        handle.finish()
    assert handle.attached and values.shape == (64, 16)


@pytest.mark.parametrize(("state", "schedule"), [("packed", "fixed"), ("dense", "fixed"), ("dense", "every=2")])
def test_copies_are_finished(state: str, schedule: str, tmp_path) -> None:
    model = network()
    handle = attach(model, state, schedule=schedule)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses(model, optimizer, 0, 3)
    best = copy.deepcopy(model)
    if state == "packed":
        with pytest.raises(TrainingError, match=r"both_ways.finish\(copy\)"):
            twofour.check(best)
        with pytest.raises(FormatError, match=r"both_ways.finish\(model\)"):
            twofour.save(best, tmp_path / "best.safetensors")
    with pytest.raises(TrainingError, match=r"finish\(\) of the handle"):
        both_ways.finish(model)
    other = torch.optim.AdamW(best.parameters(), 1e-2)
    losses(best, other, 3, 1)
    losses(model, optimizer, 3, 0)
    assert both_ways.finish(best) is best and type(best[0]) is nn.Linear
    assert twofour.check(best).ok and set(masks.of(best)) == {"0.weight", "2.weight"}
    assert other.state[best[0].weight]["exp_avg"].shape == (64, 32)
    losses(best, other, 4, 1)
    twofour.save(best, tmp_path / "best.safetensors")
    with pytest.raises(TrainingError, match="no copy of one"):
        both_ways.finish(best)
    assert handle.finish() is model and twofour.check(model).ok


def test_a_copied_handle_handles_the_copy() -> None:
    model = network()
    model.handle = attach(model)
    twin = copy.deepcopy(model)
    assert twin.handle.model is twin
    losses(twin, torch.optim.SGD(twin.parameters(), 0.1), 0, 2)
    assert (twin.handle.steps, model.handle.steps) == (2, 0)
    assert twin.handle.finish() is twin and twofour.check(twin).ok and twin[0].weight.shape == (64, 32)
    assert model.handle.attached and model.handle.finish()[0].weight.shape == (64, 32)


def test_a_state_that_is_refused_leaves_the_handle_as_it_was() -> None:
    model = network()
    handle = attach(model)
    state = attach(network(), "dense").state_dict() | {"steps": 7}
    keep = state["masks"]["2.weight"]
    keep[0, keep[0].nonzero()[0]] = False
    with pytest.raises(TrainingError, match="keeps fewer values"):
        handle.load_state_dict(state)
    assert handle.steps == 0
