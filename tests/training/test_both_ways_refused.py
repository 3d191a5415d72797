"""Arguments, examples and models that training both ways cannot begin with, and what is refused in its middle."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from tests.training.both_ways import attach, batch, network
from twofour import advise, compile, masks, prune
from twofour.errors import CompileError, PatternError, TrainingError
from twofour.layers import describe_attached
from twofour.training import both_ways


def test_convolutions_that_cannot_take_part_are_named() -> None:
    kinds = {
        "groups": nn.Conv2d(16, 16, 3, padding=1, groups=2),
        "padding_mode": nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"),
        "uneven": nn.Conv2d(16, 16, (2, 1), padding="same"),
        "only nn.Linear": nn.Conv3d(16, 16, 1),
        "served": nn.Conv2d(16, 16, 3),
    }
    for options, left in (({}, ""), ({"state": "packed"}, 'state="packed"'), ({"kernels": "dense"}, "one dense way")):
        net = nn.ModuleDict({name.replace(".", " "): layer for name, layer in kinds.items()})
        net["linear"] = nn.Linear(16, 16)
        net.forward = lambda x, net=net: net["linear"](net["served"](x).movedim(1, -1))
        handle = both_ways.attach(net, torch.randn(1, 16, 4, 4), **{"kernels": "sparse", **options})
        for name in kinds:
            said = handle.plan.skipped.get(f"{name.replace('.', ' ')}.weight", "")
            assert left in said if name == "served" else name in said or left in said, (name, said)
        handle.remove()


@pytest.mark.parametrize("schedule", ["fixed", "every=2"])
def test_a_weight_that_is_not_finite_leaves_the_model_as_it_was(schedule: str) -> None:
    model = network()
    with torch.no_grad():
        model[2].weight[3, 4] = float("nan")
    with pytest.raises(PatternError, match=r"(?s).*`2"):
        attach(model, schedule=schedule)
    assert type(model[0]) is type(model[2]) is nn.Linear and not masks.of(model)
    assert not describe_attached(model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "sometimes"}, "the schedule is not known"),
        ({"schedule": "every=0"}, "the schedule is not known"),
        ({"gradient": "4:8"}, "`gradient` is not known"),
        ({"kernels": "fast"}, "`kernels` is not known"),
        ({"begin": -1}, "an argument is impossible"),
        ({"decay": float("nan")}, "an argument is impossible"),
        ({"skip": ["0", "2"]}, "no layer can be trained both ways"),
    ],
)
def test_impossible_arguments_are_refused(options: dict[str, object], said: str) -> None:
    model = network()
    with pytest.raises(TrainingError, match=said) as caught:
        attach(model, **options)
    assert "try" in str(caught.value) and type(model[0]) is nn.Linear


@pytest.mark.parametrize("state", ["dense", "packed"])
def test_a_model_in_training_is_not_compiled(state: str) -> None:
    model = network()
    handle = attach(model, state=state)
    for given in (model, copy.deepcopy(model)):
        for refuses in (partial(compile, example=batch()), advise):
            said = r"middle of its training\n  got +2:4 both ways on `0`, `2`\n(.|\n)*finish\(\) of the handle"
            with pytest.raises(CompileError, match=said):
                refuses(given)
    assert compile(handle.finish(), batch(), graph=False).plan.layers


def test_a_batch_with_its_targets_is_no_example() -> None:
    with pytest.raises(TrainingError, match=r"does not run on the example(.|\n)*without targets"):
        both_ways.attach(network(), (batch(), batch()))


def test_models_that_cannot_take_part_are_refused() -> None:
    model = network()
    handle = attach(model)
    with pytest.raises(TrainingError, match="trained both ways already"):
        attach(model)
    state = handle.state_dict()
    handle.remove()
    with pytest.raises(TrainingError, match="is over"):
        handle.finish()
    with pytest.raises(TrainingError, match="state is of another model"):
        attach(nn.Sequential(nn.Linear(32, 64))).load_state_dict(state)
    prune(model, "2:4")
    with pytest.raises(TrainingError, match=r'masked already(.|\n)*try +prune it again: .*"2:4-transposable"'):
        attach(model)
    with pytest.raises(TrainingError, match=r"no layer can be trained both ways(.|\n)*float64"):
        both_ways.attach(network(torch.float64), batch().double(), kernels="sparse")


def test_an_empty_example_is_named() -> None:
    with pytest.raises(TrainingError, match=r"the example is empty[\s\S]*sees 0 tokens[\s\S]*a batch with samples"):
        both_ways.attach(nn.Sequential(nn.Linear(64, 64)), torch.ones(0, 64))
