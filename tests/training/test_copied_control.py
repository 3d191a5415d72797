"""The control that `finetune` copies by itself: what would make it no control is found before anything is trained."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.training.default import QUICK, quick, trained
from tests.training.small import noisy_loader, pair_of_models, recipe
from twofour import masks
from twofour.errors import TrainingError
from twofour.training import Taught, copies, distilled, finetune
from twofour.training.lesson import asked
from twofour.training.plan import Plan

BEFORE = "no control, which would also teach: "


class Net(nn.Module):
    """A net whose parts are called by a method and by a function, either of which may be another's."""

    def __init__(self, norm=True):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)
        self.norm = nn.BatchNorm1d(32, affine=norm)
        self.between = F.relu

    def inner(self, x):
        return self.b(self.between(self.norm(x)))

    def forward(self, x):
        return self.inner(self.a(x))


def of_a_lambda():
    model = Net()
    model.between = lambda x: F.relu(model.norm(x))
    return model


def of_a_method():
    model = Net()
    inner = model.inner
    model.inner = lambda x: inner(x)
    return model


def of_a_hook():
    model = Net()
    model.a.register_forward_hook(lambda module, inputs, output: output + model.b.bias.sum())
    return model


def of_a_partial():
    model = Net()
    forward = model.b.forward
    model.b.forward = functools.partial(lambda x: forward(x))
    return model


def in_training_alone():
    model = Net()
    model.register_forward_pre_hook(lambda module, x: (x[0] + model.a.weight[0] * module.training,))
    return model


def of_a_norm_without_weights():
    model = Net(norm=False)
    norm = model.norm.forward
    model.norm.forward = lambda x: norm(x)
    return model


class Sharing(Net):
    what = ("weight", "bias")

    def __deepcopy__(self, memory):
        found = type(self)()
        found.load_state_dict(self.state_dict())
        if self.what[0] == "weight":
            found.b.weight.data, found.b.bias.data = self.b.weight.data, self.b.bias.data
        else:
            found.norm.running_mean, found.norm.running_var = self.norm.running_mean, self.norm.running_var
        return found


class SharingBuffers(Sharing):
    what = ("running_mean",)


@pytest.mark.parametrize(
    "build, told",
    [
        (of_a_lambda, "norm.weight, norm.bias, norm.num_batches_tracked"),
        (of_a_method, "b.weight, b.bias, norm.weight"),
        (of_a_hook, "b.bias"),
        (of_a_partial, "b.weight, b.bias"),
        (in_training_alone, "a.weight"),
        (of_a_norm_without_weights, "norm.num_batches_tracked"),
        (Sharing, "b.weight, b.bias"),
        (SharingBuffers, "norm.running_mean, norm.running_var"),
    ],
)
def test_a_copy_that_runs_or_holds_what_is_the_models_is_no_control(build, told, caplog):
    model = build()
    result = quick(model, control="auto")
    note = f"{BEFORE}the dense model cannot be copied (ValueError: the copy would share {told})"
    assert note in result.notes and (note in caplog.text) and result.control is result.teacher is None
    assert masks.of(model) and all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_function_of_nobodys_weights_is_no_reason_against_a_copy():
    model = Net()
    model.between = lambda x: F.relu(x)
    model.a.register_forward_hook(lambda module, inputs, output: output + module.bias.sum())
    assert quick(model, control="auto").control is not None
    model = trained()
    model[2].forward = F.relu
    assert quick(model, control="auto").control is not None


def test_asking_for_what_is_shared_leaves_all_as_it_was():
    model, good = of_a_method(), Net()
    model.a.bias.requires_grad_(False)
    model.norm.eval()
    held, state, drawn = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()], torch.get_rng_state()
    plan = Plan(noisy_loader(), F.cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1), None, 1)
    question = asked(plan, model, "the control")
    with torch.no_grad():  # as a caller may be
        with pytest.raises(TrainingError, match="the copy would share"):
            copies.copied(model, question)
        assert all(p.requires_grad for p in copies.copied(good, question).parameters())
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())
    assert state == [m.training for m in model.modules()] and torch.equal(drawn, torch.get_rng_state())
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["a.bias"]
    assert all(p.grad is None for p in model.parameters())


def head(model, *, one: bool, rate: float = 0.05):
    """Return a factory that knows the head by its identity, in a group of its own or as that with another rate."""
    ids = {id(p) for p in model[4].parameters()}

    def make(params):
        if one:
            return torch.optim.SGD([{"params": [p], "lr": rate if id(p) in ids else 0.05} for p in params], lr=0.05)
        rest = [p for p in params if id(p) not in ids]
        return torch.optim.SGD([{"params": rest}, {"params": [p for p in params if id(p) in ids], "lr": rate}], lr=0.05)

    return make


def frozen_but_by_number(model):
    ids = {id(p) for p in model.parameters()}
    return lambda params: torch.optim.SGD([p for p in params if id(p) in ids], lr=0.05)


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda m: head(m, one=False), ""),
        (lambda m: head(m, one=True, rate=0.5), ""),
        (frozen_but_by_number, " (ValueError: optimizer got an empty parameter list)"),
    ],
)
def test_an_optimiser_that_knows_parameters_by_identity_has_no_control(make, told):
    model = trained()
    result = quick(model, control="auto", optimizer=make(model))
    assert f"{BEFORE}`optimizer` tells this model's parameters from the copy's{told}" in result.notes
    assert result.control is None and masks.of(model)


def test_an_optimiser_that_knows_parameters_by_identity_refuses_a_control_of_the_callers():
    for make in (lambda m: head(m, one=False), frozen_but_by_number):
        model = trained()
        with pytest.raises(TrainingError, match=r"cannot be compared[\s\S]*tells this model's parameters"):
            quick(model, control=trained(), optimizer=make(model))
        assert not masks.of(model)
    model, control = pair_of_models()
    with pytest.raises(TrainingError, match="tells this model's parameters"):
        finetune(model, noisy_loader(), **{**recipe(), "optimizer": head(model, one=False)}, control=control)
    model = trained()
    model[4].weight.requires_grad_(False)
    chosen = lambda params: torch.optim.SGD([p for p in params if p.requires_grad], lr=0.05)  # noqa: E731
    assert quick(model, control=trained(), optimizer=chosen).control is not None, "frozen by the caller in one alone"
    by_set = lambda params: torch.optim.SGD([{"params": list(set(params))}], lr=0.05)  # noqa: E731
    assert quick(trained(), control="auto", optimizer=by_set).control is not None, "the order within is nobody's"


def test_a_loader_that_brings_a_teacher_does_not_excuse_an_optimiser_of_the_models_weights():
    model, control = trained(), trained()
    given = {"loss": distilled(F.cross_entropy), "control": control}
    with pytest.raises(TrainingError, match="an optimiser of the model's weights"):
        quick(
            model,
            Taught(noisy_loader(), trained()),
            **given,
            optimizer=lambda params: torch.optim.SGD(list(model.parameters()), lr=0.05),
        )
    assert not masks.of(model)
    assert quick(model, Taught(noisy_loader(), trained()), **given).control is not None


class Two(nn.Sequential):
    def forward(self, x):
        found = super().forward(x)
        return (self[0](x), found) if self.training else found


def test_answers_of_another_shape_in_training_are_found_before_it():
    losses, loss = [], lambda out, y: F.cross_entropy(out[1] if isinstance(out, tuple) else out, y)

    def counted(out, y):
        losses.append(torch.is_grad_enabled())
        return loss(out, y)

    result = quick(Two(*trained()), control="auto", loss=counted)
    told = "a copy of the dense model cannot teach it (answers of shape (8, 32) in training, (8, 4) in evaluation)"
    assert f"{BEFORE}{told}" in result.notes and result.control is None and sum(losses) == 12
    model = Two(*trained())
    with pytest.raises(TrainingError, match=r"cannot teach it[\s\S]*\(8, 32\) in training"):
        quick(model, loss=loss, teacher="dense")
    assert not masks.of(model)


def test_a_loss_that_reads_the_models_weights_is_told_of_once(caplog):
    model = trained()

    def loss(output, target):
        return F.cross_entropy(output, target) + sum(p.square().sum() for p in model.parameters())

    seen = []
    result = quick(
        model,
        loss=loss,
        control="auto",
        evaluate=lambda m: float(len(seen.append([p.grad for p in model.parameters()]) or seen)),
    )
    words = "`loss`, or the control itself, reads weights of the model, not of the control"
    assert result.notes[-2] == words and caplog.text.count(words) == 1 and result.control is not None
    assert all(gradient is None for gradients in seen[:3] for gradient in gradients), "as the control's training left"
    assert seen[-1][0] is not None, "the model's own gradients are its own again"
    assert words not in quick(trained(), control="auto").notes


def test_where_answers_cannot_be_compared_nothing_is_copied():
    class Scalar(nn.Sequential):
        def forward(self, x):
            return super().forward(x).square().mean()

        def __deepcopy__(self, memory):
            raise AssertionError("nobody could be taught by a copy")

    given = {"loss": lambda output, _: output, "prune": QUICK}
    result = quick(Scalar(*trained()), control="auto", **given)
    assert f"{BEFORE}its answers cannot be compared" in result.notes
    assert quick(Scalar(*trained()), teacher="dense", **given).teacher is None
