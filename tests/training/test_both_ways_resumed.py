"""States of training both ways: what is saved goes on as if never stopped, what is of another run is refused."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.training.both_ways import (
    assert_near,
    attach,
    batch,
    gradients,
    network,
    steps,
)
from twofour import masks, prune
from twofour.errors import TrainingError
from twofour.layers import CARRIED
from twofour.training import both_ways


def test_the_state_dict_keeps_the_dense_keys_and_loading_moves_the_packed_weights() -> None:
    model, other = network(), network(seed=5)
    handle = attach(model)
    assert list(model.state_dict()) == list(network().state_dict())
    prune(other, {"0": "2:4-transposable", "2": "2:4-transposable"})
    model(batch())
    model.load_state_dict(other.state_dict())
    assert torch.allclose(model(batch()), other(batch()), rtol=1e-4, atol=1e-5)
    assert torch.equal(handle.masks()["0.weight"], masks.of(other)["0.weight"].keep)


@pytest.mark.parametrize("options", [{}, {"schedule": "every=2", "gradient": "2:4"}, {"begin": 2, "gradient": "2:4"}])
@pytest.mark.parametrize("handle_first", [False, True])
def test_resumed_is_as_if_never_stopped(options: dict[str, object], handle_first: bool) -> None:
    whole, part = network(), network()
    one, two = attach(whole, **options), attach(part, **options)
    first, second = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (whole, part))
    steps(whole, first, 0, 6)
    steps(part, second, 0, 3)
    resumed = network(seed=3)
    third = attach(resumed, **options)
    optimizer = torch.optim.AdamW(resumed.parameters(), 1e-2)
    loaded = [(resumed, part), (optimizer, second), (third, two)]
    for mine, theirs in loaded[2:] + loaded[:2] if handle_first else loaded:
        mine.load_state_dict(theirs.state_dict())
    steps(resumed, optimizer, 3, 3)
    assert one.steps == third.steps == 6
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize("options", [{"gradient": "2:4"}, {"schedule": "every=2"}, {"begin": 3}])
def test_a_state_of_other_arguments_is_refused(options: dict[str, object]) -> None:
    state, handle = attach(network(), **options).state_dict(), attach(network())
    before = str(handle.plan)
    with pytest.raises(
        TrainingError, match=f"other arguments(?s:.*){next(iter(options))}.*{next(iter(options.values()))}"
    ):
        handle.load_state_dict(state)
    assert str(handle.plan) == before
    del state["arguments"]  # as older states have none
    handle.load_state_dict({**state, "masks": {}})


@pytest.mark.parametrize(("form", "name"), [({"gradient": "2:4"}, "seed"), ({"schedule": "every=2"}, "decay")])
def test_what_a_form_of_training_goes_by_is_part_of_its_state(form: dict[str, str], name: str) -> None:
    state, other = attach(network(), **form, **{name: 7}).state_dict(), attach(network(), **form)
    with pytest.raises(TrainingError, match=f"other arguments\n  got +.'{name}': 7"):
        other.load_state_dict(state)
    exact = attach(network(), **{name: 7}).state_dict()  # goes by neither
    attach(network()).load_state_dict(exact)


@pytest.mark.parametrize("state", ["dense", "packed"])
def test_a_model_that_an_earlier_version_pickled_trains_on(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    model = network()
    attach(model, state=state)
    kind = type(model[0].__dict__[CARRIED])
    later, whole = {"anew", "_plans"}, kind.__getstate__
    earlier = lambda products: {name: held for name, held in whole(products).items() if name not in later}  # noqa: E731
    monkeypatch.setattr(kind, "__getstate__", earlier)
    old = pickle.loads(pickle.dumps(model))
    assert_near(gradients(old, batch()), gradients(model, batch()), 1e-7)
    with torch.autocast("cpu", torch.bfloat16):
        old(batch()).float().sum().backward()


@pytest.mark.parametrize("masked_there", [False, True])
def test_resumed_layers_have_masks_as_the_interrupted_run_had(
    gaining: set[tuple[int, int]], masked_there: bool
) -> None:
    """What gains is measured, and may come out otherwise in another process."""
    of_second = {(48, 64), (64, 48)}

    def attached(masked: bool, seed: int = 0) -> tuple[nn.Module, both_ways.BothWays, torch.optim.Optimizer]:
        gaining.clear()
        gaining.update({(64, 32), (32, 64)} | (of_second if masked else set()))
        model = network(seed=seed)
        handle = attach(model, kernels="measured")
        return model, handle, torch.optim.AdamW(model.parameters(), 1e-2)

    whole, _kept, optimizer = attached(masked_there)
    part, handle, interrupted = attached(masked_there)
    steps(whole, optimizer, 0, 6)
    steps(part, interrupted, 0, 3)
    saved = copy.deepcopy((handle.state_dict(), part.state_dict(), interrupted.state_dict()))
    resumed, third, after = attached(not masked_there, seed=3)
    for one, state in zip((third, resumed, after), saved, strict=True):
        one.load_state_dict(copy.deepcopy(state))
    assert third.plan.layers[1].unmasked is not masked_there
    steps(resumed, after, 3, 3)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    other, fourth, late = attached(not masked_there, seed=4)
    for one, state in zip((other, late, fourth), (saved[1], saved[2], saved[0]), strict=True):
        one.load_state_dict(copy.deepcopy(state))  # the model before the handle
    if not masked_there:
        stranger = network()
        steps(stranger, torch.optim.SGD(stranger.parameters(), 0.1), 0, 1)
        lost = r"`2.weight`: a layer has lost(.|\n)*then model.load_state_dict"
        for going_on in (
            lambda: steps(other, late, 3, 3),
            fourth.finish,
            fourth.remove,
            lambda: steps(other, late, 3, 1),
        ):
            with pytest.raises(TrainingError, match=lost):
                going_on()
        for one, state in zip((other, late), saved[1:], strict=True):
            one.load_state_dict(state)
    steps(other, late, 3, 3)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in whole.state_dict().items())


def test_a_state_decides_about_masks_in_all_types_that_were_met(gaining: set[tuple[int, int]]) -> None:
    gaining.update({(64, 32), (32, 64)})
    state = attach(network(), kernels="measured", schedule="every=2").state_dict()
    assert state["unmasked"] == ["2.weight"]
    gaining.update({(48, 64), (64, 48)})
    model = network()
    handle = attach(model, kernels="measured", schedule="every=2")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for loaded in (False, True):
        if loaded:
            gradients(model, batch())
            handle.load_state_dict(state)  # its plan is of float32
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                model(batch()).float().square().mean().backward()
            optimizer.step()
    assert {layer.dtype for layer in handle.plan.layers} == {"bfloat16"} and list(handle.masks()) == ["0.weight"]
    handle.finish()
    assert list(masks.of(model)) == ["0.weight"]


def test_kept_values_alone_refuse_layers_that_had_no_mask(gaining: set[tuple[int, int]]) -> None:
    gaining.update({(64, 32), (32, 64)})
    state = attach(network(), kernels="measured").state_dict()
    model = network()
    packed = attach(model, state="packed")
    with pytest.raises(TrainingError, match=r'without a mask(.|\n)*first `2.weight`(.|\n)*state="dense"'):
        packed.load_state_dict(state)
    packed.finish()
    assert masks.of(model).keys() == {"0.weight", "2.weight"}
    packed = attach(network(), state="packed")
    packed.load_state_dict(attach(network()).state_dict())


def test_an_earlier_version_that_was_to_begin_later_masks_all_layers(gaining: set[tuple[int, int]]) -> None:
    assert not gaining
    model = network()
    state = attach(network(), begin=3).state_dict()
    for later in ("unmasked", "types"):
        del state[later]
    handle = attach(model, kernels="measured", begin=3)
    handle.load_state_dict(state)
    steps(model, torch.optim.SGD(model.parameters(), 0.1), 0, 3)
    assert handle.masks().keys() == {"0.weight", "2.weight"}


@pytest.mark.parametrize("part", ["choices", "types", "functions", "unmasked", "arguments"])
def test_a_state_with_a_part_that_is_none_of_ours_is_refused(part: str) -> None:
    handle = attach(network())
    with pytest.raises(TrainingError, match=r"state is of another model|state was taken with other arguments"):
        handle.load_state_dict({**handle.state_dict(), part: 3})
