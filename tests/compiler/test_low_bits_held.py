"""Codes in the place of a layer's weight: no float copy beside them, what stands beside them is followed or refused."""

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.of_bits import of_bits, run, whole
from twofour import quantization
from twofour.compiler.codes import Codes, hold_codes, hold_floats
from twofour.compiler.low_bits import LinearOfCodes
from twofour.compiler.unpacked import Reads
from twofour.errors import KernelError, QuantizationError

pytestmark = pytest.mark.usefixtures("codes_win")


def test_codes_are_the_weight_and_what_stands_beside_them_is_followed() -> None:
    model, x = of_bits("w4", "a8", data=True), torch.randn(3, 71)
    fast: Any = twofour.compile(model, x, tokens=(3,), graph=False)
    assert {"0.weight", "0.weight_step"} <= set(model.state_dict())
    assert set(fast.state_dict()) == {
        "0.bias",
        *(f"{i}.{part}" for i in (0, 2) for part in ("input_step", "input_zero")),
    }
    for layer in fast.plan.layers[::2]:
        assert layer.bytes_after == fast[int(layer.name)].__dict__["_twofour_attached"].runs.product.prepared.nbytes
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert all(run(again)) and torch.equal(again(x), whole(model, x))
    whole_weight, scales = quantization.of(model)["0"].whole_weight(model[0])  # type: ignore[index]
    assert torch.equal(fast[0].weight.clone(), whole_weight * scales.detach()[:, None])
    with torch.no_grad():
        for one in (model, fast):
            one[0].bias.mul_(-2)
            one[0].input_step.mul_(1.5)
    assert torch.equal(fast(x), whole(model, x)) and torch.equal(fast(x.double()), model(x.double()))
    given = x.clone().requires_grad_()
    fast(given).sum().backward()
    assert given.grad is not None and given.grad.abs().sum() > 0
    with quantization.in_whole_numbers(fast):
        assert torch.equal(fast(x), whole(model, x))
    with pytest.raises(KernelError, match="cannot be changed"):
        fast[0].weight.mul_(2)
    with pytest.raises(QuantizationError, match="codes in the place"):
        quantization.remove(fast)
    hold_floats(fast[0])
    assert torch.equal(fast(x), whole(model, x)) and type(fast[0]) is type(model[0])  # type: ignore[index]


def test_no_float_weight_stays_in_memory_behind_the_codes() -> None:
    model, x = of_bits("w4", "a8", data=True), torch.randn(3, 71)
    fast: Any = twofour.compile(model, x, tokens=(3,), graph=False)
    copied = copy.deepcopy(model)
    copied(x)  # looks at its steps, and notes of which tensors
    kept = weakref.ref(copied[0].weight)  # type: ignore[index]
    codes = LinearOfCodes.of("0", copied[0], fast[0].__dict__["_twofour_attached"].runs.product.dispatch)  # type: ignore[index]
    hold_codes("0", copied[0], Codes.of(copied[0], lambda: codes), Reads())  # type: ignore[index]
    assert kept() is None and torch.equal(copied(x), fast(x))


def test_a_weight_that_another_layer_has_too_stays_and_is_followed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(64, 48), nn.Linear(48, 64, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    model, x = twofour.quantize(Tied().eval(), "w4", "a8", ends=None), torch.tensor([1, 5, 7])
    fast: Any = twofour.compile(model, x, tokens=(3,), graph=False)
    assert fast.head.weight is fast.embed.weight and "another layer has" in fast.plan.layers[-1].reason
    assert torch.equal(fast(x), whole(model, x))
    with torch.no_grad():
        for one in (model, fast):
            one.embed.weight.mul_(-2)  # type: ignore[union-attr, operator]
            one.head.weight_step.mul_(1.5)  # type: ignore[union-attr, operator]
    assert torch.equal(fast(x), whole(model, x))


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_steps_that_scale_nothing_are_refused_by_name(bad: float) -> None:
    model = of_bits("w2", "a2", data=True)
    model[2].weight_step.data[1] = bad  # type: ignore[union-attr, index]
    with pytest.raises(QuantizationError, match="layer `2`: a step"):
        twofour.compile(model, torch.randn(2, 71), tokens=(2,))


@pytest.mark.parametrize(("part", "bad"), [("input_step", 0.0), ("input_step", float("nan")), ("input_zero", 1.6)])
def test_steps_that_become_nothing_after_compiling_are_refused_by_name(part: str, bad: float) -> None:
    model, x = of_bits("w2", "a2", data=True), torch.randn(2, 71)
    for graph in (False, True):
        fast: Any = twofour.compile(model, x, tokens=(2,), graph=graph)
        with torch.no_grad():
            getattr(fast[2], part).fill_(bad)
        with pytest.raises(QuantizationError, match=f"layer `2`: a step of the layer is no scale: `{part}`"):
            fast(x)
