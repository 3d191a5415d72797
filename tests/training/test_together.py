"""Schemes, training both ways and pruned gradients on one model: what may stand on what, and how it comes off."""

import copy

import pytest
import torch
from torch import nn

import twofour
from tests.turns import in_turn
from twofour import export, masks, quantization, training
from twofour.errors import FormatError, LayerError, PatternError, TrainingError
from twofour.layers import CARRIED
from twofour.training import both_ways, gradual, lora, s_ste, sdgp, sr_ste


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48))


def step(model: nn.Module) -> None:
    x = torch.randn(8, 32)
    nn.functional.mse_loss(model(x), torch.zeros(8, 48)).backward()


SCHEMES = {
    "sr_ste": lambda model: sr_ste.attach(model, "2:4"),
    "s_ste": lambda model: s_ste.attach(model, "2:4"),
    "gradual": lambda model: gradual.attach(model, "2:4", end=10),
    "lora": lambda model: lora.attach(twofour.prune(model, "2:4")),
    "int8": lambda model: quantization.attach(twofour.prune(model, "2:4"), "int8"),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_sdgp_over_a_scheme_goes_first_and_both_end_whole(name: str) -> None:
    scheme = SCHEMES[name](model := network())
    handle = sdgp.attach(model, "2:4")
    step(model)
    if name != "gradual":  # it puts no parametrisation under the class
        with pytest.raises(TrainingError, match=r"cannot end yet(.|\n)*SDGP"):
            scheme.finish()
    handle.remove()
    assert scheme.finish() is model and twofour.check(model).ok and type(model[0]) is nn.Linear


@pytest.mark.parametrize("name", SCHEMES)
def test_nothing_is_put_over_sdgp_and_the_way_out_is_named(name: str) -> None:
    model = network() if name not in ("lora", "int8") else twofour.prune(network(), "2:4")
    handle = sdgp.attach(model, "2:4")
    attach = {**SCHEMES, "lora": lora.attach, "int8": quantization.attach}[name]
    with pytest.raises(TrainingError, match=r"pruned gradients \(SDGP\) on `0`(.|\n)*remove\(\)"):
        attach(model)
    for changes in (lambda: twofour.prune(model, "4:8"), lambda: twofour.prune(copy.deepcopy(model), "4:8")):
        with pytest.raises(LayerError, match=r"SDGP(.|\n)*remove\(\)"):
            changes()
    with pytest.raises(TrainingError, match="SDGP"):
        both_ways.attach(model, torch.randn(8, 32))
    fast = twofour.compile(model, tokens=(8,))
    assert "remove() of its handle first" in str(fast.plan)
    handle.remove()


@pytest.mark.parametrize("name", SCHEMES)
def test_both_ways_and_a_scheme_refuse_each_other(name: str) -> None:
    model = network()
    handle = both_ways.attach(model, torch.randn(8, 32), kernels="sparse")
    attach = {**SCHEMES, "lora": lora.attach, "int8": quantization.attach}[name]
    with pytest.raises(TrainingError, match="2:4 both ways on `0`, `2`"):
        attach(model)
    assert handle.finish() is model and twofour.check(model).ok
    SCHEMES[name](other := network())
    with pytest.raises(TrainingError):
        both_ways.attach(other, torch.randn(8, 32))


@pytest.mark.parametrize("name", ["sr_ste", "both ways"])
def test_a_model_under_a_scheme_is_not_saved_as_a_result(name: str, tmp_path) -> None:
    model = network()
    if name == "both ways":
        handle = both_ways.attach(model, torch.randn(8, 32), kernels="sparse")
    else:
        handle = sr_ste.attach(model, "2:4")
    with pytest.raises(FormatError, match=r"middle of its training(.|\n)*finish\(\)"):
        twofour.save(model, tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir()) and len(str(handle).splitlines()[0]) < 80 and "object at" not in str(handle)
    twofour.save(handle.finish(), tmp_path / "w.safetensors")
    assert export.read(tmp_path / "w.safetensors").packed.keys() == masks.of(model).keys()


def test_the_kernels_of_an_interrupted_run_come_back() -> None:
    first = both_ways.attach(network(), torch.randn(8, 32), kernels="sparse")
    second = both_ways.attach(network(), torch.randn(8, 32), kernels="dense", seconds=0.01)
    second.load_state_dict(first.state_dict())
    chosen = [[layer.choices[product].kernel for product in layer.choices] for layer in first.plan.layers]
    assert chosen == [[layer.choices[product].kernel for product in layer.choices] for layer in second.plan.layers]
    assert "nm_matmul" in str(second.plan)
    for wrong in ({"x": 1}, {**first.state_dict(), "steps": "q"}, None, {**first.state_dict(), "masks": 3}):
        with pytest.raises(TrainingError, match="the state is of another model"):
            second.load_state_dict(wrong)


@in_turn(
    "attach",
    [
        lambda: sdgp.attach("m"),
        lambda: sdgp.attach(network(), seed="a"),
        lambda: sdgp.attach(network(), seconds="b"),
        lambda: both_ways.attach("m", torch.randn(8, 32)),
        lambda: both_ways.attach(network(), torch.randn(8, 32), decay="x"),
        lambda: both_ways.attach(network(), torch.randn(8, 32), begin=0.5),
        lambda: both_ways.attach(network(), torch.randn(8, 33)),
        lambda: sr_ste.attach(network(), "2:4", decay="x"),
        lambda: gradual.attach(network(), "2:4", begin=1.5, end=3),
        lambda: lora.attach(twofour.prune(network(), "2:4"), rank="8"),
    ],
)
def test_arguments_of_other_types_are_refused(attach) -> None:
    with pytest.raises(TrainingError, match="wanted"):
        attach()


def test_sharded_scores_are_refused_before_native_code_reads_them() -> None:
    class Sharded(torch.Tensor):
        full_tensor = torch.Tensor.clone

    with pytest.raises(PatternError, match="DTensor"):
        twofour.patterns.parse("2:4").project(torch.randn(4, 8).as_subclass(Sharded))


def test_training_lists_everything_that_can_be_attached() -> None:
    assert {"both_ways", "sdgp", "sr_ste", "s_ste", "gradual", "lora"} <= set(training.__all__)


ATTACHMENTS = {
    **SCHEMES,
    "both_ways": lambda model: both_ways.attach(model, torch.randn(8, 32), kernels="sparse"),
    "sdgp": lambda model: sdgp.attach(model, "2:4"),
}


@pytest.mark.parametrize("name", ATTACHMENTS)
def test_all_that_is_attached_ends_in_one_way(name: str) -> None:
    attachment = ATTACHMENTS[name](model := network())
    assert isinstance(attachment, training.Scheme) and attachment.layers and attachment.title in repr(attachment)
    attachment.load_state_dict(attachment.state_dict())
    with pytest.raises(TrainingError, match=r"state is of (an)?other"):
        attachment.load_state_dict({"strange": 1})
    assert attachment.attached and attachment.finish() is model and not attachment.attached
    for again in (attachment.finish, attachment.remove, lambda: attachment.load_state_dict({})):
        with pytest.raises(TrainingError, match=r"is over\n  got +a second"):
            again()
    assert type(model[0]) is nn.Linear and not model[0].__dict__.get(CARRIED)
    ATTACHMENTS[name](network())  # nothing is left that refuses the next one
