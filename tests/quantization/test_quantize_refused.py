"""What low bits cannot do is refused by name: widths, layers, data, steps, inputs; layers in floats are told of."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import twofour
from tests.quantization.small import mlp, widths
from tests.turns import in_turn
from twofour import quantization
from twofour.errors import DataError, QuantizationError
from twofour.quantization.carried import TINY


def test_a_rule_behind_one_for_every_layer_is_refused() -> None:
    for rules in ({"*": "w2", "0": "w4"}, {"0": "w3", "**": "w2", "2": "w4"}):
        with pytest.raises(QuantizationError, match=r"a rule of weights can never apply\n  got +'[02]' behind '\*+'"):
            twofour.quantize(mlp(), rules, "a8")
    with pytest.raises(QuantizationError, match="a rule of activations can never apply"):
        twofour.quantize(mlp(), "w2", {"*": "a8", "4": "a4"})


@in_turn(
    ("weights", "activations", "said"),
    [
        ("w9", None, "width of weights is not known"), ("w0", None, "is not known"), ("a2", None, "is not known"),
        (2, None, "is not known"), ("W4 ", None, 'weights="w4"'), ("w10", None, 'weights="w2"'),
        ("s1", None, "b1 is"), ("u2", None, "is not known"),
        ("float32", None, "is not known"),
        ("w2", "a9", "width of activations"), ("w2", "w2", "width of activations"), ("w2", "ternary", "activations"),
        ("w2", "a1.58", "three levels of an input"), ("w2", 2, "width of activations"),
        ({}, None, "rules of weights are malformed"),
        ({"nowhere": "w2"}, None, "matches no layer"), ({"*": "w11"}, None, "is not known"),
        ({"*": "float"}, None, "no layer can compute"), ("float", "a2", "no layer can compute"),
    ],
)  # fmt: skip
def test_widths_without_meaning_are_refused(weights: object, activations: object, said: str) -> None:
    model = mlp()
    with pytest.raises(QuantizationError, match=said):
        twofour.quantize(model, weights, activations)  # type: ignore[arg-type]
    assert not quantization.of(model)


def test_what_cannot_compute_in_low_bits_is_refused_by_name() -> None:
    sparse = twofour.prune(mlp(), "2:4", eligibility="any")
    with pytest.raises(QuantizationError, match=r"layer `2`(.|\n)*b1 has no zero(.|\n)*w1\.58"):
        twofour.quantize(sparse, "w1", "a2")
    assert not quantization.of(sparse)
    broken = mlp()
    broken[2].weight.data[3, 4] = torch.inf
    with pytest.raises(QuantizationError, match="layer `2`: the weight holds NaN or infinity"):
        twofour.quantize(broken, "w2")
    with pytest.raises(QuantizationError, match=r"could exceed 32 bits(.|\n)*70000 products"):
        twofour.quantize(nn.Linear(70000, 1), "w8", "a8")
    assert widths("w8", "a8").longest() == (2**31 - 1) // (128 * 255) and widths("w1", "a1").longest() > 1 << 30
    with pytest.raises(QuantizationError, match=r"could exceed 32 bits(.|\n)*at most 33025"):  # values to +-255
        twofour.quantize(nn.Linear(33026, 1), "w8", "a8", symmetric=False)
    grouped = twofour.quantize(nn.Linear(70016, 1), "w8", "a8", group=64)  # whose sums are of 64 products
    assert quantization.of(grouped)[""].group == 64 and grouped(torch.ones(1, 70016)).isfinite().all()
    twice = twofour.quantize(mlp(), "w2")
    with pytest.raises(QuantizationError, match="something is attached"):
        twofour.quantize(twice, "w2")
    with pytest.raises(twofour.errors.LayerError, match="low bits"):
        twofour.prune(twice, "2:4")
    with pytest.raises(QuantizationError, match="no layer can compute"):
        twofour.quantize(nn.Sequential(nn.Conv1d(4, 4, 3)), "w2")
    with pytest.raises(QuantizationError, match="no layer of low bits"), quantization.in_whole_numbers(mlp()):
        pass
    with pytest.raises(QuantizationError, match="no layer can compute"):
        quantization.remove(mlp())
    for wrong in ({"ends": 1}, {"ends": 9}, {"scales": "row"}, {"samples": 0}, {"skip": ["nowhere"]}):
        with pytest.raises(QuantizationError):
            twofour.quantize(mlp(), "w2", "a2", **wrong)  # type: ignore[arg-type]


def test_ranges_that_float32_does_not_hold_are_refused_by_name() -> None:
    model = mlp()
    model[2].weight.data[0, :2] = torch.tensor([3e38, -3e38])
    with pytest.raises(QuantizationError, match=r"layer `2`: a step of the layer is no scale: `weight_step`"):
        twofour.quantize(model, "w4", symmetric=False)
    assert not quantization.of(model)


def test_means_that_float32_does_not_hold_are_refused_by_name() -> None:
    for weights in ("w1", "w1.58"):
        model = mlp()
        model[2].weight.data.fill_(3e38)
        with pytest.raises(QuantizationError, match=r"layer `2`: the mean of the weight's magnitudes"):
            twofour.quantize(model, weights, ends=None)
        assert not quantization.of(model)


def test_data_that_say_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="no calibration data"):
        twofour.quantize(mlp(), "w2", "a2", data=[])
    with pytest.raises(DataError, match="does not run on the calibration data"):
        twofour.quantize(mlp(), "w2", "a2", data=[torch.randn(4, 31)])
    model = mlp()
    with pytest.raises(DataError, match=r"layer `0`(.|\n)*infinite"):
        twofour.quantize(model, "w2", "a2", data=[torch.full((4, 32), torch.inf)])
    assert not quantization.of(model)
    zero = twofour.quantize(mlp(), "w2", "a2", data=[torch.zeros(4, 32)])  # no range: each token has its own
    assert not quantization.held_by(zero[0]).static  # type: ignore[union-attr, index]


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), TINY / 4])
def test_steps_that_scale_nothing_are_refused_by_name(bad: float) -> None:
    model = twofour.quantize(mlp(), "w2", "a2", data=[torch.randn(8, 32)])
    for name in ("weight_step", "input_step"):
        wrong = copy.deepcopy(model)
        step = getattr(wrong[2], name)  # type: ignore[index]
        step.data.view(-1)[0] = bad
        held = quantization.of(wrong)["2"]
        with pytest.raises(QuantizationError, match=f"layer `2`: a step of the layer is no scale: `{name}`"):
            held.whole_weight(wrong[2], "2")  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "bad", "said"),
    [
        ("weight_step", 0.0, "got     0.0"), ("input_step", 0.0, "got     0.0"), ("input_step", float("nan"), "nan"),
        ("input_zero", 1.6, "a whole number from 0 to 3"), ("input_zero", 4.0, "from 0 to 3"),
    ],
)  # fmt: skip
def test_steps_that_become_nothing_are_refused_at_the_next_call(name: str, bad: float, said: str) -> None:
    model, x = twofour.quantize(mlp(), "w2", "a2", data=[torch.randn(8, 32)], ends=None), torch.randn(3, 32)
    want = model(x)
    with torch.no_grad():
        step = getattr(model[2], name)  # type: ignore[index]
        kept = step.clone()
        step.view(-1)[:1] = bad
    for whole in (False, True):
        said_of = rf"layer `2`: a step of the layer is no scale: `{name}`(.|\n)*{said}"
        with (
            pytest.raises(QuantizationError, match=said_of),
            quantization.in_whole_numbers(model) if whole else nullcontext(),
        ):
            model(x)
    assert model.train()(x).shape == want.shape  # training may pass through it
    with torch.no_grad():
        step.copy_(kept)
    assert torch.equal(model.eval()(x), want)


def test_layers_that_stay_float_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.other = Own(16, 16), Other(16, 16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.conv = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.other(self.own(x))
            return self.conv(self.attention(x, x, x)[0][:, None])

    model = twofour.quantize(Model().eval(), "w2", "a2")
    assert list(quantization.of(model)) == ["own"] and isinstance(model.own, Own)
    x = torch.randn(2, 4, 16)
    with quantization.in_whole_numbers(model):
        whole = model(x)
    assert torch.equal(model(x), whole)


def test_whole_numbers_as_inputs_are_refused_and_no_images_are_answered() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    twofour.quantize(model, "w2", "a2", data=[x], ends=None)
    with pytest.raises(QuantizationError, match=r"torch\.uint8(.|\n)*x\.float\(\)"):
        model(x.to(torch.uint8))
    assert model(x[:0]).shape == (0, 4, 6, 6)
    with pytest.raises(QuantizationError, match="compiled model cannot be quantised"):
        twofour.quantize(twofour.compile(nn.Sequential(nn.Linear(8, 8)), torch.randn(1, 8)))


def test_layers_that_cannot_be_rounded_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Linear(6, 6), nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"))
    twofour.quantize(model, "w2", skip="2")
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said == "1 of 2 layers stay in floats: `0`: Conv1d: low bits are for Linear and Conv2d"
