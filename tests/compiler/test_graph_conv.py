"""Residual networks through compile(..., graph=True): normalisation, sums and ReLU inside the convolutions."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import quick
from tests.compiler.whole import called
from twofour.compiler import choose_conv
from twofour.compiler import graph as compiled_graph
from twofour.compiler.graph_conv import ConvLayer, kept_convs
from twofour.kernels import find
from twofour.kernels.base import Row
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry
from twofour.packing import dense_of


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.down(x)
        return self.relu(y)


def residual() -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model = nn.Sequential(stem, Block(16, 32, 2), Block(32, 32, 1), head)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def test_what_follows_a_convolution_runs_in_its_pass() -> None:
    model = twofour.prune(residual(), "2:4")
    x = torch.randn(2, 3, 16, 16)
    fast = quick(model, x, graph=True)
    account = fast.plan.account
    assert account.rewrites["what follows a convolution into it"] == 7 + 2 + 5  # normalisations, sums, ReLUs
    labels = {part for entry in account.after for part in entry.operator.split(", ")}  # those of one call too
    assert {"conv+relu", "conv+add+relu", "conv"} <= labels
    assert not labels & {"batch_norm", "relu", "relu_", "add", "add_"}
    assert fast.plan.error < 1e-5
    for other in (x, x[:1], torch.randn(3, 3, 20, 12), x.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(fast(other), model(other), atol=1e-4, rtol=1e-4)
    assert len({layer.name for layer in fast.plan.layers}) == len(fast.plan.layers) == 8, "each is listed once"
    folded = [layer for layer in fast.plan.layers if "normalisation folded in" in layer.reason]
    assert len(folded) == 7 and all(layer.kind == "Conv2d" for layer in folded)
    runs = {call.name: call for call in convolutions(fast)}
    for layer in folded:  # kept once, folded, with what makes the model's own of it
        own = fast.get_submodule(layer.name)
        weight = dense_of(own.prepared.source())
        assert torch.equal(
            weight.view_as(model.get_submodule(layer.name).weight), model.get_submodule(layer.name).weight
        )
        if own.prepared.nbytes == 0:
            codes = layer.bytes_after - runs[layer.name].prepared.nbytes
            assert 0 <= codes <= weight.numel() // 4 + 1, f"{layer.name}: two bits a number"
    assert any(fast.get_submodule(layer.name).prepared.nbytes == 0 for layer in folded)


def convolutions(fast: nn.Module) -> list[ConvLayer]:
    """Return the convolutions of a model's graph; they may stand inside one call of several."""
    inner = [module for one in called(fast) if isinstance(one, nn.Module) for module in one.modules()]
    return [module for module in inner if isinstance(module, ConvLayer)]


def test_a_contiguous_image_is_read_as_it_comes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 2, padding=1), nn.ReLU6(), nn.Conv2d(32, 16, 1), nn.Flatten()).eval()
    x = torch.randn(1, 3, 32, 32)
    fast = quick(model, x, graph="native")
    assert "contiguous" not in dict(fast.plan.account.calls.through)
    for given in (x, x.to(memory_format=torch.channels_last), torch.randn(1, 32, 32, 3).permute(0, 3, 1, 2)[:, :, ::2]):
        torch.testing.assert_close(fast(given), model(given), atol=1e-4, rtol=1e-4)


def test_small_memory_keeps_no_folded_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_graph, "_engines", lambda *_: ({"layers": 2.0, "graph": 1.0}, 0.0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()).eval()
    nn.init.uniform_(model[1].running_var, 0.5, 1.5)
    twofour.prune(model, "2:4")
    x = torch.randn(2, 16, 5, 5)
    fast = quick(model, x, graph=True, memory="small")
    assert fast.plan.bytes_after == fast[0].prepared.nbytes
    (layer,) = [layer for layer in called(fast) if isinstance(layer, ConvLayer)]
    assert layer.prepared is fast[0].prepared and layer.problem.activation == "none"
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)


def test_what_does_not_fit_stays_outside() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.free = nn.BatchNorm2d(16, track_running_stats=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            twice = self.norm(y) + y  # two users of the convolution
            return torch.relu(self.free(self.conv(twice)) + self.conv(x).mean(1, keepdim=True))

    torch.manual_seed(0)
    model = twofour.prune(Odd().eval(), "2:4")
    x = torch.randn(2, 16, 9, 9)
    fast = quick(model, x, graph=True)
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)


def test_conv1d_in_a_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(16, 24, 5, 2, 2), nn.BatchNorm1d(24), nn.ReLU(), nn.Conv1d(24, 8, 1)).eval()
    model = twofour.prune(model, "2:4")
    x = torch.randn(2, 16, 21)
    fast = quick(model, x, graph=True)
    assert fast.plan.account.rewrites["what follows a convolution into it"] == 2
    assert kept_convs({name: m for name, m in fast.named_modules() if isinstance(m, ConvLayer)}) == {}
    for other in (x, torch.randn(1, 16, 30)):
        torch.testing.assert_close(fast(other), model(other), atol=1e-4, rtol=1e-4)


OTHERS = (nn.SiLU(inplace=True), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU6(inplace=True), nn.ReLU6())


@pytest.mark.parametrize("activation", OTHERS, ids=str)
def test_other_activations_run_in_its_pass_too(activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), activation, nn.Conv2d(32, 32, 1)).eval()
    x = torch.randn(2, 16, 9, 9)
    for given in (model, twofour.prune(model, "2:4")):
        fast = quick(given, x, graph=True)
        assert fast.plan.account.rewrites["what follows a convolution into it"] == 2
        assert not {entry.operator for entry in fast.plan.account.after} & {
            "silu",
            "silu_",
            "gelu",
            "hardtanh",
            "hardtanh_",
        }
        torch.testing.assert_close(fast(x), given(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranges", ["static", "dynamic"])
def test_relu6_in_whole_numbers_needs_no_call_from_python(ranges: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bound was asked of a tensor, in Python: no run of an int8 MobileNetV2 was recorded."""

    def in_bytes(times: dict[str, float], memory: str, **_: object) -> ConvKernel:
        return min((find(name, ConvKernel) for name in times), key=lambda row: (row.dtype != "int8", row.isa == "any"))

    monkeypatch.setattr(choose_conv, "pick", in_bytes)
    torch.manual_seed(0)
    bottleneck = (nn.Conv2d(16, 48, 1), nn.ReLU6(), nn.Conv2d(48, 48, 3, 2, 1, groups=48), nn.ReLU6())
    model = nn.Sequential(*bottleneck, nn.Conv2d(48, 24, 1), nn.Conv2d(24, 64, 3, padding=1), nn.ReLU6()).eval()
    nn.init.normal_(model[5].weight)  # some answers are above the bound
    twofour.prune(model, "2:4")
    x = 9 * torch.randn(1, 16, 12, 12)
    data = [x, 9 * torch.randn(2, 16, 12, 12)] if ranges == "static" else None
    fast = quick(model, x, graph="native", dtype="int8", data=data)
    whole = [call for call in convolutions(fast) if call.dispatch.kernels[0].dtype == "int8"]
    assert [call.problem.activation for call in whole].count("relu6") == 2
    assert not fast.plan.calls.reason and fast.plan.calls.native >= 3, fast.plan.calls
    for given in (x, x[..., :7], 9 * torch.randn(3, 16, 12, 12)):
        y, wanted = fast(given), model(given)
        assert float(y.max()) == 6.0 and (y - wanted).norm() <= 0.03 * wanted.norm()


def test_clips_to_other_numbers_stay_calls_of_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 8, 3), nn.Hardtanh(), nn.Conv2d(8, 8, 1), nn.Hardtanh(0.0, 4.0)).eval()
    x = torch.randn(2, 16, 9, 9)
    fast = quick(model, x, graph=True)
    assert fast.plan.account.rewrites["what follows a convolution into it"] == 0
    torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)


def test_zeros_around_an_image_are_left_to_the_convolution() -> None:
    torch.manual_seed(0)
    apart = nn.Sequential(nn.ZeroPad2d((0, 1, 2, 1)), nn.Conv2d(32, 32, 3, 2, groups=32), nn.BatchNorm2d(32), nn.SiLU())
    model = nn.Sequential(nn.ZeroPad2d((1, 2, 0, 1)), nn.Conv2d(16, 32, 3, padding=1), apart).eval()
    x = torch.randn(2, 16, 9, 9)
    fast = quick(model, x, graph=True)
    assert fast.plan.account.rewrites["what follows a convolution into it"] == 4
    assert not {entry.operator for entry in fast.plan.account.after} & {"pad", "constant_pad_nd", "silu"}
    assert not fast.plan.calls.reason, "no weight is put into another order"
    for given in (x, torch.randn(1, 16, 13, 8)):
        torch.testing.assert_close(fast(given), model(given), atol=1e-5, rtol=1e-5)
    kept = nn.Sequential(nn.ZeroPad2d(1), nn.ReLU(), nn.Conv2d(16, 32, 3)).eval()  # the zeros are read by another
    assert "pad" in {entry.operator for entry in quick(kept, x, graph=True).plan.account.after}


@pytest.mark.parametrize("fused", [True, False], ids=["ahead with what follows", "behind"])
def test_what_a_library_was_chosen_for_is_measured_with_what_follows_it(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raced(kernels, prepare, call, copies, what):  # alone the library is ahead
        answer = call(kernels[0], prepare(kernels[0]))
        follows = answer.func.problem.activation == "silu"
        assert answer().shape[1] == 24
        return {
            kernel.name: 1.0 + (kernel.isa == "any") * (1.0 if follows and fused else -0.9) for kernel in kernels
        }, 0.0

    monkeypatch.setattr(choose_conv, "race_kernels", raced)
    monkeypatch.setattr(compiled_graph, "_engines", lambda *_: ({"layers": 2.0, "graph": 1.0}, 0.0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(16, 24, 3, 2), nn.BatchNorm2d(24), nn.SiLU()).eval()
    nn.init.uniform_(model[2].running_var, 0.5, 1.5)
    x = torch.randn(2, 16, 10, 10 if fused else 12)  # of one size the times are kept
    fast = quick(model, x, graph=True)
    assert choose_conv.find(fast[1].dispatch.names[0], Row).isa == "any"
    (layer,) = fast.plan.layers
    assert (choose_conv.find(layer.kernel, Row).isa == "any") != fused
    assert ("chosen once more in the graph" in layer.reason) == fused
    assert layer.bytes_before == model[1].weight.nbytes and layer.dispatch
    for given in (x, torch.randn(1, 16, 13, 8)):
        torch.testing.assert_close(fast(given), model(given), atol=1e-5, rtol=1e-5)


def test_a_convolution_is_measured_on_as_many_copies_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the whole model's weights make: a weight alone would stay in the cache."""
    found: list[int] = []

    def raced(kernels, prepare, call, copies, what):
        found.append(copies)
        return {kernel.name: 2.0 - (kernel.isa == "any") for kernel in kernels}, 0.0

    monkeypatch.setattr(choose_conv, "race_kernels", raced)
    monkeypatch.setattr(compiled_graph, "_engines", lambda *_: ({"layers": 2.0, "graph": 1.0}, 0.0))
    model = nn.Sequential(nn.Conv2d(8, 24, 3), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 600))
    fast = quick(model.eval(), torch.randn(1, 8, 11, 9), graph=True)
    weights = model[0].weight.nbytes, model[4].weight.nbytes
    assert found == [sum(weights) // weights[0]] * 2 and found[0] > 1
    assert len(fast.plan.layers) == 2


def test_uneven_zeros_are_more_than_sums() -> None:
    """A library makes them in a pass of its own, which is in its time."""
    geometry = Geometry(4, 8, (3, 3), before=(0, 1), after=(1, 1))
    uneven, even = (ConvProblem.of(g) for g in (geometry, replace(geometry, before=(1, 1))))
    weight, images = torch.randn(8, 4, 3, 3), (1, 6, 6)
    fused = [choose_conv.ConvCase("c", weight, None, problem, images).fused for problem in (uneven, even)]
    assert fused == [True, False]
    assert choose_conv.ConvCase("c", weight, None, even, images, residual=True).fused
