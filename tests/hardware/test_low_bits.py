"""estimate of layers of low bits: bytes of their own width, operations of int8 units, the float price beside it."""

import pytest
import torch
from torch import nn

import twofour
from twofour.hardware import MACHINES, machine
from twofour.hardware.low_bits import SINGLE_BITS, of_low_bits
from twofour.hardware.matmul_shapes import Product
from twofour.quantization import LowBits, Widths
from twofour.quantization.widths import encoding_of

SIZE, H100 = 8192, machine("h100-sxm")


def held(weights: str, inputs: str | None) -> LowBits:
    encoding = encoding_of(weights, "weights")
    assert encoding is not None
    return LowBits(Widths(encoding, encoding_of(inputs, "activations")), False)


def seconds(weights: str, inputs: str | None, tokens: int) -> float:
    product = Product("0.weight", tokens, SIZE, SIZE)
    return float(of_low_bits(product, held(weights, inputs), H100, "bfloat16", cold=True).seconds[0])


def test_bytes_decide_for_few_tokens_and_operations_for_many() -> None:
    costs = of_low_bits(Product("0.weight", 1, SIZE, SIZE), held("w2", "a8"), H100, "bfloat16", cold=True)
    assert SIZE * (SIZE / 4 + 4) <= float(costs.bytes[0]) <= SIZE * (SIZE / 4 + 4) + 16 * SIZE
    few = [seconds(weights, "a8", 1) for weights in ("w1", "w1.58", "w2", "w4", "w8")]
    assert few == sorted(few) and few[-1] > 1.1 * few[0]
    many = [seconds(weights, "a8", 8192) for weights in ("w1", "w8")]
    assert many[1] == pytest.approx(many[0], rel=0.1)
    assert seconds("w4", None, 8192) > 1.5 * seconds("w4", "a8", 8192)  # float inputs: units of bfloat16


def test_a_model_is_priced_in_floats_and_in_its_widths() -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    options = {"machine": "h100-sxm", "dtype": "bfloat16"}
    before = twofour.estimate(model, torch.empty(4, 1024), **options)
    assert all(row.low_bits_ms is None for row in before.rows) and before.low_bits_ms == before.dense_ms
    twofour.quantize(model, {"4": "float", "*": "w1"}, "a8", ends=None)
    for given in ({"example": torch.empty(4, 1024)}, {"tokens": 4}):
        found = twofour.estimate(model, **given, **options)
        assert [row.width for row in found.rows] == ["w1a8", "w1a8", ""]
        assert [row.dense_ms for row in found.rows] == [row.dense_ms for row in before.rows]
        assert [row.layer for row in found.rows] == ["0", "2", "4"]
        assert "in its low bits (w1a8)" in found.summary() and "ms w1a8" in str(found)
        assert found.to_dict()["low_bits_ms"] == found.low_bits_ms
        assert "Hopper has no published rate of 1-bit products" in found.summary()
    assert not before.single_bits and "1-bit" not in before.summary()
    assert {one.family for one in MACHINES.values()} <= set(SINGLE_BITS)
    assert set(twofour.quantization.of(model)) == {"0", "2"}


def test_a_compiled_model_is_priced_without_reading_a_weight(caplog: pytest.LogCaptureFixture) -> None:
    model = twofour.quantize(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)), "w2", "a2", ends=None)
    fast = twofour.compile(model, tokens=(4,))
    want = twofour.estimate(model, tokens=4, machine="h100-sxm")
    caplog.clear()
    assert twofour.estimate(fast, tokens=4, machine="h100-sxm") == want and not caplog.records
