"""compile on every kind of layer: Hugging Face's Conv1D and attention run sparse, the others say why they do not."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import quick
from tests.layers.small import EVERY, Conv1D
from twofour import checker
from twofour.compiler import CompiledLinear
from twofour.compiler.advise import advise
from twofour.compiler.build import masked_sizes
from twofour.compiler.plan import LayerPlan
from twofour.packing import pack


class Block(nn.Module):
    """The MLP of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Conv1D(128, 64), Conv1D(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.fixture
def block() -> nn.Module:
    torch.manual_seed(0)
    return twofour.prune(Block().eval(), "2:4")


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_hugging_face_conv1d_runs_sparse(no_measuring: None, block: nn.Module, dtype: str, graph: bool) -> None:
    x = torch.randn(2, 5, 64)
    fast = twofour.compile(block, x, dtype, tokens=(1,), graph=graph)
    plans = {entry.name: entry for entry in fast.plan.layers}
    assert plans["up"].sparse and plans["down"].sparse and plans["up"].kind == "Conv1D (Hugging Face)"
    assert plans["up"].shape == (128, 64)
    with torch.no_grad():
        for given in (x, torch.randn(1, 64).unsqueeze(0)):
            error = (fast(given) - block(given)).norm() / block(given).norm()
            assert error < {"float32": 1e-5, "bfloat16": 1e-2, "int8": 3e-2}[dtype]
    assert fast.up.weight.shape == block.up.weight.shape == (64, 128)
    report = checker.check(fast)
    assert report.ok and [found.kind for found in report.layers] == ["hf_conv1d", "hf_conv1d"]


def test_compiled_conv1d_in_a_file(no_measuring: None, block: nn.Module, tmp_path: Path) -> None:
    x, path = torch.randn(3, 64), tmp_path / "m.safetensors"
    fast = twofour.compile(block, x, tokens=(1,))
    twofour.save(fast, path)
    again = twofour.load(path, Block().eval())
    assert isinstance(again.up, CompiledLinear)
    with torch.no_grad():
        torch.testing.assert_close(again(x), block(x), rtol=1e-5, atol=1e-5)
    masked = twofour.load(path, Block(), masked=True)
    assert torch.equal(masked.up.weight, block.up.weight)
    assert torch.equal(*(twofour.masks.of(each)["up.weight"].keep for each in (masked, block)))
    twofour.save(fast, path, packed=False)
    assert torch.equal(twofour.load(path, Block(), masked=True).down.weight, block.down.weight)


def test_a_conv1d_that_stays_torchs_own_is_counted_as_packed_in_a_file(block: nn.Module) -> None:
    plain = LayerPlan("up", "Conv1D", (128, 64), 1, "", "", None, None, "", 32768, 32768, 32768)
    (found,) = masked_sizes(block, [plain])
    assert found.bytes_in_file == pack(block.up.weight.detach(), "2:4", axis=0).nbytes < 32768


def test_all_masked_weights_of_an_lstm_are_counted_in_a_file() -> None:
    model = twofour.prune(nn.Sequential(nn.LSTM(32, 16, 2)), "2:4", skip=()).eval()
    plain = LayerPlan("0", "LSTM", (64, 32), None, "torch", "", None, None, "", 14336, 14336, 14336)
    (found,) = masked_sizes(model, [plain])
    assert found.bytes_in_file == sum(
        pack(weight.detach(), "2:4").nbytes for weight in model.parameters() if weight.ndim == 2
    )


def test_advice_on_conv1d(no_measuring: None) -> None:
    found = advise(Block(), patterns="2:4", tokens=(1,))
    assert [(row.layer, row.shape) for row in found.rows] == [("up", (128, 64)), ("down", (64, 128))]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0])


def test_attention_runs_sparse_in_a_graph(no_measuring: None) -> None:
    torch.manual_seed(0)
    model = twofour.prune(Attending().eval(), "2:4")
    x = torch.randn(2, 7, 32)
    plain = twofour.compile(model, x, tokens=(1,), graph=False)
    reasons = {entry.name: entry.reason for entry in plain.plan.layers}
    assert "a graph runs its projections packed" in reasons["attention"]
    fast = twofour.compile(model, x, tokens=(1,), graph=True)
    assert {entry.name for entry in fast.plan.layers if entry.sparse} == {"attention", "attention.out_proj", "out"}
    with torch.inference_mode():
        for given in (x, x[:, :4]):
            torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(plain(given), model(given), rtol=1e-4, atol=1e-5)


class Crossing(nn.Module):
    def __init__(self, kdim: int | None) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, kdim=kdim, vdim=kdim, batch_first=True)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.out(self.attention(x, memory, memory, need_weights=False)[0])


@pytest.mark.parametrize("kdim", [None, 64])
def test_attention_between_two_sequences_runs_sparse_in_a_graph(no_measuring: None, kdim: int | None) -> None:
    torch.manual_seed(0)
    model = twofour.prune(Crossing(kdim).eval(), "2:4")
    pair = torch.randn(2, 7, 32), torch.randn(2, 7, kdim or 32)
    fast = twofour.compile(model, pair, tokens=(1,), graph=True)
    parts = {entry.name for entry in fast.plan.layers if entry.sparse} - {"attention.out_proj", "out"}
    fused = {f"attention.in_proj_weight.rows_{rows}" for rows in ("0_32", "32_96")}
    assert parts == (fused if kdim is None else {f"attention.{name}_proj_weight" for name in "qkv"})
    assert "; in the graph `attention." in next(e.reason for e in fast.plan.layers if e.name == "attention")
    dense = sum(p.nbytes for p in model.parameters() if p.ndim == 2)
    assert fast.plan.bytes_before == dense
    with torch.inference_mode():
        for n in (7, 4):
            given = pair[0][:, :n], pair[1][:, : n - 1]
            torch.testing.assert_close(fast(*given), model(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["conv3d", "conv_transpose2d", "fused", "separate"])
def test_other_kinds_stay_dense_with_a_reason(kind: str) -> None:
    model = twofour.prune(nn.Sequential(EVERY[kind]()), "2:4")
    entry = twofour.compile(model, tokens=(1,)).plan.layers[0]
    assert entry.kernel == "torch" and entry.reason.startswith("dense: ")
    wanted = "a graph runs" if kind in ("fused", "separate") else f"no packed kernel for {entry.kind} yet"
    assert wanted in entry.reason and entry.shape == tuple(next(iter(model.parameters())).shape)


def test_a_layer_that_holds_modules_stays_with_them() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
            self.fc.add_module("extra", nn.Linear(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.fc(x) + self.fc.extra(x))

    model, x = twofour.prune(Adapted().eval(), "2:4"), torch.randn(4, 64)
    for graph in (False, True):
        fast = quick(model, x, graph=graph)
        torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
        assert type(fast.fc) is nn.Linear and type(fast.other) is not nn.Linear
    fast = quick(model, x, graph=False)
    assert "`extra` stands inside it" in next(layer.reason for layer in fast.plan.layers if layer.name == "fc")
