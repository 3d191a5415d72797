"""Convolutions of low bits, compiled: the bits of their whole numbers, or why no kernel runs."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.of_bits import whole
from twofour import native, quantization
from twofour.compiler.graph_low_bits import CODES
from twofour.compiler.thresholds import Sums
from twofour.errors import KernelError, QuantizationError
from twofour.kernels.bits_matmul import BitWeight, twos
from twofour.kernels.bits_matmul.conv import BitsConvProblem, bits_conv_rows, requantise
from twofour.kernels.conv import Geometry
from twofour.kernels.dense_matmul import PLAIN
from twofour.kernels.quantization import Quantization

pytestmark = pytest.mark.usefixtures("own_cache")


def of_bits(weights: str, inputs: str, *, data: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 33, 3, padding=1), nn.ReLU(), nn.Conv2d(33, 20, 3, 2, padding=(1, 0), bias=False)]
    model = nn.Sequential(*layers, nn.Conv2d(20, 6, 1, dilation=2)).eval()
    return twofour.quantize(model, weights, inputs, data=[torch.randn(4, 3, 9, 9)] if data else None, ends=None)


def floats_last(calls: dict[str, Any], **_: Any) -> tuple[dict[str, float], float]:
    """A race that kernels win."""
    return {name: 1.0 + (name == PLAIN.name) for name in calls}, 0.0


def floats_first(calls: dict[str, Any], **_: Any) -> tuple[dict[str, float], float]:
    """A race that kernels lose."""
    return {name: 2.0 - (name in (PLAIN.name, "floats")) for name in calls}, 0.0


@pytest.fixture
def kernels_and_graph_win(graph_wins: None, monkeypatch) -> None:
    for module in ("low_bits_conv", "low_bits"):
        monkeypatch.setattr(f"twofour.compiler.{module}.race", floats_last)


def by_kernels(fast: nn.Module) -> bool:
    return all(held.runs is not None for held in quantization.of(fast).values())


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize(
    ("weights", "inputs"), [("w1", "a2"), ("w2", "a2"), ("w1.58", "a8"), ("b3", "s4"), ("w8", "b2")]
)
def test_kernels_give_the_bits_of_the_whole_numbers(weights: str, inputs: str, data: bool, monkeypatch) -> None:
    monkeypatch.setattr("twofour.compiler.low_bits_conv.race", floats_last)
    model, x = of_bits(weights, inputs, data=data), torch.randn(2, 3, 9, 9)
    fast = twofour.compile(model, x, graph=False)
    plan: Any = fast.plan
    assert by_kernels(fast) and plan.error == 0.0
    for layer in plan.layers:
        name = quantization.of(model)[layer.name].widths.name
        assert layer.kernel in {row.name for row in bits_conv_rows()} and layer.reason.startswith(f"{name} ")
        assert "2.00x the speed of torch's float32 convolution" in layer.reason
    for shape in ((2, 3, 9, 9), (1, 3, 12, 7), (3, 9, 9)):
        x = 2 * torch.randn(shape)
        assert torch.equal(fast(x), whole(model, x))
        assert fast(x).is_contiguous() and model(x).is_contiguous()  # an average behind adds in the order of memory
        last = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
        assert torch.equal(fast(last), whole(model, x)) and fast(last).stride() == model(last).stride()


def test_codes_are_the_weight_copies_and_other_inputs_are_served(monkeypatch) -> None:
    monkeypatch.setattr("twofour.compiler.low_bits_conv.race", floats_last)
    model, other, x = of_bits("w2", "a2"), of_bits("w2", "a2"), torch.randn(2, 3, 9, 9)
    fast = twofour.compile(model, x, graph=False)
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert by_kernels(again) and torch.equal(again(x), whole(model, x))
    assert not any(name.endswith((".weight", "weight_step")) for name in fast.state_dict())
    held = [low.runs.product.prepared.nbytes for low in quantization.of(fast).values()]  # type: ignore[union-attr]
    assert [layer.bytes_after for layer in fast.plan.layers] == held  # type: ignore[union-attr]
    with torch.no_grad():
        for one in (other, fast):
            one[0].bias.mul_(-2)
            one[2].input_step.mul_(1.5)
    assert torch.equal(fast(x), whole(other, x)) and not torch.equal(fast(x), whole(model, x))
    given = x.clone().requires_grad_()
    fast(given).sum().backward()
    assert given.grad is not None and given.grad.abs().sum() > 0
    x[1, 0, 4, 4] = float("nan")
    assert torch.equal(fast(x).nan_to_num(7.0), whole(other, x).nan_to_num(7.0)) and fast(x)[0].isfinite().all()


def test_steps_that_become_nothing_after_compiling_are_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr("twofour.compiler.low_bits_conv.race", floats_last)
    fast: Any = twofour.compile(of_bits("w2", "a2"), torch.randn(2, 3, 9, 9), graph=False)
    with torch.no_grad():
        fast[2].input_step.fill_(0.0)
    with pytest.raises(QuantizationError, match="layer `2`: a step of the layer is no scale: `input_step`"):
        fast(torch.randn(2, 3, 9, 9))


def test_floats_serve_images_whose_codes_take_two_gigabytes(monkeypatch) -> None:
    monkeypatch.setattr("twofour.compiler.low_bits_conv.race", floats_last)
    fast = twofour.compile(of_bits("w2", "a2"), torch.randn(2, 3, 9, 9), graph=False)
    low: Any = quantization.of(fast)["0"]
    immense = torch.zeros(1).expand(1, 3, 1 << 15, 1 << 14)  # without memory of its own
    assert not low.runs.product.takes(immense) and low.runs.product.takes(immense[..., : 1 << 11])
    assert low.runs(fast[0], immense) is None


def test_what_no_kernel_takes_runs_in_floats_and_says_so() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")).eval()
    x = torch.randn(1, 4, 8, 8)
    twofour.quantize(model, "w2", "a2", data=[x], ends=None)
    fast = twofour.compile(model, x, graph=False)
    reasons = [layer.reason for layer in fast.plan.layers]  # type: ignore[union-attr]
    assert "not in 2 groups" in reasons[0] and "padding_mode 'circular'" in reasons[1]
    assert torch.equal(fast(x), model(x))


def chained(widths: tuple[str, str] = ("w1", "a2"), size: int = 12) -> tuple[nn.Sequential, torch.Tensor]:
    """A net whose convolutions have normalisations of both signs, clips and pools between them."""
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Conv2d(1, 40, 3, padding=1, bias=False), nn.BatchNorm2d(40), nn.ReLU()]
    layers += [nn.Conv2d(40, 70, 3, padding=1), nn.BatchNorm2d(70), nn.ReLU6(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(70, 33, 3, 2, padding=1), nn.ReLU(), nn.Conv2d(33, 8, 1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            for part in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(part)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    x = torch.randn(3, 1, size, size)
    return twofour.quantize(model, *widths, data=[x]), x


@pytest.mark.parametrize(
    ("widths", "size"),
    [
        (("w2", "a1"), 13),
        pytest.param(("w1.58", "a4"), 12, marks=pytest.mark.long),
        pytest.param(("w1", "a2"), 12, marks=pytest.mark.long),
        pytest.param(("w2", "s2"), 13, marks=pytest.mark.long),
    ],
)
def test_convolutions_of_a_graph_hand_codes_on_and_answer_as_the_model_does(
    widths, size: int, kernels_and_graph_win
) -> None:
    model, x = chained(widths, size)
    fast = twofour.compile(model, x, graph=True)
    account = fast.plan.account  # type: ignore[union-attr]
    assert account.engine == "graph" and account.rewrites[CODES] == 3, account
    for images in (x, 2 * torch.randn_like(x), torch.randn(3, 1, size, size)):
        want = whole(model, images)
        program = fast.forward.program
        for _ in range(3):  # by Python, recorded, replayed
            torch.testing.assert_close(fast(images), want, rtol=0, atol=0)
        torch.testing.assert_close(program(images)[0], want, rtol=0, atol=0)
    x[1, 0, 3, 3] = float("nan")
    assert fast(x)[1].isnan().all() and fast(x)[[0, 2]].isfinite().all()


@pytest.mark.long
def test_a_chain_makes_its_sums_in_whole_numbers_where_these_are_asked_for(kernels_and_graph_win, monkeypatch) -> None:
    model, x = chained()
    fast: Any = twofour.compile(model, x, graph=True)
    assert fast.plan.account.engine == "graph"
    want, plain = whole(model, x), fast(x)
    made: list[nn.Module] = []
    own = quantization.reference.integer_product
    monkeypatch.setattr(
        "twofour.quantization.layer.integer_product", lambda module, *given: made.append(module) or own(module, *given)
    )
    found = whole(fast, x)
    assert made == [fast.get_submodule(name) for name in quantization.of(fast)] and torch.equal(found, want)
    made.clear()
    assert torch.equal(fast(x), plain) and not made


def test_nan_reaches_what_reads_it_and_nothing_else(kernels_and_graph_win) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 2)).eval()
    x = torch.randn(2, 3, 16, 16)
    twofour.quantize(model, "w2", "a2", data=[x], ends=None)
    fast = twofour.compile(model, x, graph=True)
    account: Any = fast.plan.account  # type: ignore[union-attr]
    assert account.engine == "graph" and account.rewrites[CODES] == 1
    for at, lost in (((0, 0, 5, 5), 0), ((0, 0, 4, 4), 4 * 6)):
        given = x.clone()
        given[at] = float("nan")
        want = whole(model, given)
        assert want.isnan().sum() == lost
        for _ in range(3):  # by Python, recorded, replayed
            torch.testing.assert_close(fast(given), want, rtol=0, atol=0, equal_nan=True)


def test_one_image_without_a_batch_and_large_kernels_are_served(kernels_and_graph_win) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, (1, 80), padding=(0, 40))).eval()
    x = torch.randn(3, 9, 9)
    twofour.quantize(model, "w2", "a2", data=[x[None]], ends=None)
    fast = twofour.compile(model, x, graph=True)
    plan: Any = fast.plan
    assert "80) has more than 64 taps" in plan.layers[1].reason and not plan.account.left_out
    assert torch.equal(fast(x), whole(model, x))


@pytest.mark.skipif(native.isa() == "scalar", reason="needs a row above scalar")
def test_a_file_of_another_machine_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("twofour.compiler.low_bits_conv.race", floats_last)
    model, x = of_bits("w2", "a2"), torch.randn(2, 3, 9, 9)
    kept = pickle.dumps(twofour.compile(model, x, graph=False))
    monkeypatch.setenv("TWOFOUR_ISA", "scalar")
    with pytest.raises(KernelError, match="cannot run here"):
        pickle.loads(kept)


def test_what_thresholds_cannot_stand_for_stays_between_the_convolutions(monkeypatch) -> None:
    monkeypatch.setattr("twofour.compiler.low_bits_conv.race", floats_last)
    torch.manual_seed(0)
    between = [nn.Sigmoid(), nn.MaxPool2d(3, 2), nn.Sequential(nn.MaxPool2d(2), nn.BatchNorm2d(4))]
    for module in between:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), module, nn.Conv2d(4, 4, 1)).eval()
        x = torch.randn(2, 3, 9, 9)
        twofour.quantize(model, "w2", "a2", data=[x], ends=None)
        fast = twofour.compile(model, x, graph=True)
        account: Any = fast.plan.account  # type: ignore[union-attr]
        assert account.rewrites[CODES] == 0 and not account.left_out
        torch.testing.assert_close(fast(x), whole(model, x), rtol=0, atol=0)


@pytest.mark.long
def test_a_rule_that_fails_leaves_each_convolution_alone_in_the_graph(monkeypatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr("twofour.compiler.low_bits_conv.race", floats_last)
    monkeypatch.setattr("twofour.compiler.graph_low_bits._handed_on", fail)
    model, x = chained()
    fast = twofour.compile(model, x, graph=True)
    account: Any = fast.plan.account  # type: ignore[union-attr]
    assert account.left_out == {CODES: "ValueError: on purpose"} and account.engine_ms
    torch.testing.assert_close(fast(x), whole(model, x))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_thresholds_are_the_sums_at_which_the_float_formula_changes(bits: int) -> None:
    torch.manual_seed(bits)
    norm = nn.BatchNorm2d(6).eval()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.running_mean, std=9.0)  # type: ignore[arg-type]
    norm.weight.data[0] = 0.0  # a channel that is constant
    geometry = Geometry(5, 6, (3, 3))
    weight = BitWeight(torch.randint(0, 4, (6, 45), dtype=torch.uint8), twos(2), torch.rand(6) + 0.1)
    problem = BitsConvProblem(geometry, Quantization(0.37, bits=2))
    sums = Sums(problem, weight, torch.randn(6), (norm, torch.relu), Quantization(0.8, bits=bits))
    found = sums.thresholds(True, 1)
    every = torch.arange(-sums.largest, sums.largest + 1)[:, None].expand(-1, 6)
    assert found is not None and torch.equal(requantise(every[:, :, None, None], found).flatten(1), sums.codes(every))
    norm.running_mean[2] = float("nan")  # type: ignore[index]
    assert sums.thresholds(True, 1) is None


def test_a_file_has_the_images_so_that_nothing_is_measured_again(tmp_path, monkeypatch) -> None:
    model, x = of_bits("w2", "a2"), torch.randn(2, 3, 21, 17)
    fast: Any = twofour.compile(copy.deepcopy(model), x, graph=False)
    twofour.save(fast, tmp_path / "m")
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path / "another"))
    again: Any = twofour.load(tmp_path / "m", copy.deepcopy(model), graph=False)
    seen = [(layer.name, layer.tokens, layer.kernel, layer.dense_ms) for layer in fast.plan.layers]
    assert [(layer.name, layer.tokens, layer.kernel, layer.dense_ms) for layer in again.plan.layers] == seen
    assert {tokens for _, tokens, *_ in seen} == {2 * 21 * 17, 2 * 11 * 8}
    assert any(note.startswith("0 cases measured here") for note in again.plan.notes), again.plan.notes


@pytest.mark.long
def test_a_graph_of_a_file_runs_in_floats_where_those_are_faster(tmp_path, kernels_and_graph_win, monkeypatch) -> None:
    model, x = chained()
    twofour.save(twofour.compile(model, x, graph=True), tmp_path / "m")
    for module in ("low_bits_conv", "low_bits"):
        monkeypatch.setattr(f"twofour.compiler.{module}.race", floats_first)
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path / "another"))
    again = twofour.load(tmp_path / "m", chained()[0], graph=True, measure=True)  # not by the times in the file
    account: Any = again.plan.account  # type: ignore[union-attr]
    assert account.engine == "graph" and not account.left_out, account
    assert not by_kernels(again) and torch.equal(again(x), whole(model, x))


class Residual(nn.Module):
    """A stem, a block with a normalised branch across, and a sum in place: written as models write them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.first, self.second = nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.Conv2d(16, 16, 3, 1, 1)
        self.across, self.last = nn.Conv2d(8, 16, 1, 2, bias=False), nn.Conv2d(16, 16, 3, 1, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16, affine=index != 1) for index in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        y = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        x = (y + self.norms[2](self.across(x))).relu()
        y = self.norms[3](self.last(x))
        y += x
        return torch.relu_(y)


def test_what_stands_behind_a_real_answer_is_part_of_its_call_and_answers_the_same_bits(kernels_and_graph_win) -> None:
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(3, 2, 10, 10)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        for numbers in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            if numbers is not None:
                nn.init.uniform_(numbers, 0.2, 2.0)
    twofour.quantize(model.eval(), "w2", "a2", data=[x], ends=None)
    fast = twofour.compile(model, x, graph=True)
    account: Any = fast.plan.account  # type: ignore[union-attr]
    named, conv = {share.operator for share in account.after}, "conv of bits + batch_norm"
    assert account.engine == "graph" and {conv, f"{conv} + relu", f"{conv} + add + relu"} <= named, account.after
    assert f"conv of bits, {conv} + add + relu" in named and not {"batch_norm", "add", "relu"} & named
    for images in (x, 3 * torch.randn(1, 2, 10, 10), x.contiguous(memory_format=torch.channels_last)):
        for _ in range(3):  # by Python, recorded, replayed
            torch.testing.assert_close(fast(images), whole(model, images), rtol=0, atol=0)
    x[1, 0, 3, 3] = float("nan")
    torch.testing.assert_close(fast(x), whole(model, x), rtol=0, atol=0, equal_nan=True)
    assert fast(x)[1].isnan().any() and fast(x)[[0, 2]].isfinite().all()


def averaged(channels: int, *, pool: bool) -> nn.Sequential:
    """Return two convolutions of low bits, the mean over the pixels of the last one, pooled or not, and a Linear."""
    torch.manual_seed(0)
    first: list[nn.Module] = [nn.Conv2d(2, 16, 3, padding=1), nn.ReLU()]
    last: list[nn.Module] = [nn.Conv2d(16, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    mean: list[nn.Module] = [*[nn.MaxPool2d(2)] * pool, nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*first, *last, *mean, nn.Linear(channels, 5)).eval()


@pytest.mark.parametrize("channels", [64, 70])
@pytest.mark.parametrize("pool", [False, True])
def test_a_mean_of_pixels_is_part_of_the_last_convolutions_call(
    channels: int, pool: bool, kernels_and_graph_win
) -> None:
    model, x = averaged(channels, pool=pool), torch.randn(3, 2, 9, 7).contiguous(memory_format=torch.channels_last)
    twofour.quantize(model, "w2", "a2", data=[x])
    fast = twofour.compile(model, x, graph=True)
    account: Any = fast.plan.account  # type: ignore[union-attr]
    named = {share.operator for share in account.after}
    taken = channels % 64 == 0  # torch adds other channels otherwise
    call = "conv of bits, conv of bits + batch_norm + relu" + (" + max_pool" * pool + " + mean") * taken
    assert account.engine == "graph" and call in named, named
    assert bool({"max_pool2d", "adaptive_avg_pool2d", "mean"} & named) is not taken, named
    for images in (x, 3 * torch.randn_like(x), torch.randn(5, 2, 9, 7).contiguous(memory_format=torch.channels_last)):
        for _ in range(3):  # by Python, recorded, replayed
            torch.testing.assert_close(fast(images), whole(model, images), rtol=0, atol=0)
    x[1, 0, 3, 3] = float("nan")
    assert fast(x)[1].isnan().all() and fast(x)[[0, 2]].isfinite().all()
