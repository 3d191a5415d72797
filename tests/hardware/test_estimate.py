"""estimate: which products a model runs, priced; and that finding them stays cheap."""

from __future__ import annotations

import cProfile
import json
import pstats

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twofour
from twofour.errors import HardwareError, LayerError
from twofour.hardware import Estimate, gemm, plot
from twofour.hardware.matmul_shapes import Product, trace


def test_linear_convolution_and_attention_products():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 32, 3, stride=2, padding=1)
            self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=4)
            self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
            self.fc = nn.Linear(16, 64)
            self.bare = nn.Linear(64, 32, bias=False)

        def forward(self, x):
            x = self.up(F.relu(self.grouped(self.conv(x))))
            x = self.fc(x.flatten(2).transpose(1, 2))
            return F.scaled_dot_product_attention(*[self.bare(x)] * 3)

    products = trace(Net(), torch.randn(2, 16, 8, 8)).products
    assert products[:5] == (
        Product("conv.weight", 2 * 16, 32, 16 * 9, taps=9, positions=2 * 64),
        Product("grouped.weight", 2 * 16, 8, 8 * 9, 4, taps=9, positions=2 * 16),
        Product("up.weight", 2 * 16, 16 * 4, 32),
        Product("fc.weight", 2 * 64, 64, 16),
        Product("bare.weight", 2 * 64, 32, 64),
    )
    flops = sum(2 * p.m * p.n * p.k * p.batch for p in products[5:])
    assert flops == 2 * 2 * 2 * 64 * 64 * 32  # q k and p v


def test_multihead_attention_tied_weights_and_arguments():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(48, 32)
            self.attend = nn.MultiheadAttention(32, 4, batch_first=True)
            self.head = nn.Linear(32, 48, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids, scale=1.0):
            x = self.embed(ids)
            return self.head(self.attend(x, x, x, need_weights=False)[0] * scale)

    net = Net().train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    products = trace(net, {"ids": torch.zeros(3, 5, dtype=torch.int64), "scale": 2.0}).products
    weights = [(p.weight, p.m, p.n, p.k) for p in products if p.weight]
    assert weights == [
        ("attend.in_proj_weight", 15, 96, 32),
        ("attend.out_proj.weight", 15, 32, 32),
        ("head.weight", 15, 48, 32),
    ]
    assert net.training and all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not any(tensor.is_meta for tensor in net.state_dict().values())


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 10))


def test_rows_are_gemms_and_totals_their_sum():
    result = twofour.estimate(small(), torch.randn(32, 64), machine="a100-sxm", dtype="float16")
    assert isinstance(result, Estimate) and not result.cold and result.traced
    assert [row.layer for row in result.rows] == ["0", "2", "3"]
    first = result.rows[0]
    assert first.dense_ms == pytest.approx(gemm("a100-sxm", "float16", m=32, n=128, k=64) * 1e3)
    assert first.sparse_ms == pytest.approx(gemm("a100-sxm", "float16", m=32, n=128, k=64, sparse=True) * 1e3)
    assert result.rows[2].sparse_ms is None and "multiple of 8" in result.rows[2].reason
    assert result.dense_ms == pytest.approx(sum(row.dense_ms for row in result.rows) + result.other_ms)
    assert result.loses == ("0", "2") and result.best_ms == result.dense_ms < result.sparse_ms
    assert result.rows[0].bound == "launch" and 0 < result.rows[0].sparse_mj < 10
    content = json.loads(json.dumps(result.to_dict()))
    assert content["machine"] == "a100-sxm" and len(content["rows"]) == 3 and content["loses"] == ["0", "2"]
    assert "sparse does not pay in 2 layers" in str(result) and "stays dense" in str(result)


def test_large_layers_gain_and_cold_weights_are_noticed():
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(2)))
    result = twofour.estimate(model, tokens=8192, machine="h200")
    assert result.cold and not result.traced and not result.loses
    assert all(1.1 < row.ratio < 2 and row.bound == "math" for row in result.rows)
    skipped = twofour.estimate(model, tokens=8192, machine="h200", skip="1")
    assert skipped.rows[1].reason == "left out by skip='1'" and skipped.rows[0] == result.rows[0]


def test_refusals():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x) if x.sum() > 0 else x

    with pytest.raises(HardwareError, match="does not run on the shapes of the example alone"):
        twofour.estimate(Reads(), torch.ones(1, 8), machine="h200")
    with pytest.raises(HardwareError, match="an example, or tokens from 1"):
        twofour.estimate(small(), machine="h200")
    with pytest.raises(HardwareError, match="runs no matrix product"):
        twofour.estimate(nn.ReLU(), torch.ones(1, 8), machine="h200")
    with pytest.raises(HardwareError, match="no dense matrix unit for int4"):
        twofour.estimate(small(), torch.ones(1, 64), machine="h200", dtype="int4")
    with pytest.raises(LayerError, match="nowhere"):
        twofour.estimate(small(), torch.ones(1, 64), machine="h200", skip="nowhere")


def calls(model: nn.Module, example: torch.Tensor) -> int:
    twofour.estimate(model, example, machine="a100-sxm")
    profile = cProfile.Profile()
    profile.enable()
    twofour.estimate(model, example, machine="a100-sxm")
    profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_whole_models_stay_cheap():
    """24 and 32 ms of Zen 5 for ResNet-50 and BERT-base took 89,000 and 85,000 Python calls: linear in the layers."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)  # BERT-base's depth
    assert calls(encoder, torch.randn(2, 16, 64)) < 120_000
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(53)]
    assert calls(nn.Sequential(*blocks), torch.randn(1, 16, 8, 8)) < 120_000  # ResNet-50's number of convolutions


def test_plots(tmp_path):
    pytest.importorskip("matplotlib", reason="needs requirements/figures.txt")
    result = twofour.estimate(small(), torch.randn(32, 64), machine="a100-sxm")
    first = plot("a100-sxm", tmp_path / "one.svg", rows=result).read_bytes()
    assert plot("a100-sxm", tmp_path / "two.svg", rows=result).read_bytes() == first
    assert b"roofline" in first and b"speed-up" in first
    with pytest.raises(HardwareError, match=r"ends in '\.gif'"):
        plot("a100-sxm", tmp_path / "one.gif")
    with pytest.raises(HardwareError, match="cannot be drawn"):
        plot("a100-sxm", tmp_path / "one.svg" / "below a file.svg")


def test_steps_of_a_recurrent_layer_are_one_line():
    result = twofour.estimate(nn.LSTM(32, 32, batch_first=True), torch.randn(2, 50, 32), machine="a100-sxm")
    assert len(result.rows) == 100 and len(result.grouped()) == 1
    lines = str(result).splitlines()
    assert len(lines) == 2 and ", 100 times: 2 x 128 x 32: " in lines[0]
    assert twofour.estimate(nn.Sequential(nn.GRU(8, 8), nn.Linear(8, 8)), tokens=2, machine="a100-sxm").left_out == (
        "0",
    )
