"""The price of blocks on dense units and of dense groups on units of 2:4: the stated rules by hand, and models."""

import pytest
import torch
from torch import nn

import twofour
from tests.turns import in_turn
from twofour.errors import HardwareError, PatternError
from twofour.hardware import MACHINES, explain
from twofour.hardware.blocks import used
from twofour.hardware.fitted import FITTED
from twofour.hardware.machines import machine as find
from twofour.patterns import Block

WIDE = nn.Sequential(nn.Linear(8192, 8192, bias=False))


@in_turn(
    ("side", "tokens", "share"),
    [(32, 128, 0.4), (64, 128, 2 / 3), (128, 128, 1.0), (256, 4096, 1.0), (32, 1, 129 / 132), (16, 4096, 16 * 2 / 144)],
)
def test_the_use_of_the_units_by_hand(side: int, tokens: int, share: float) -> None:
    assert float(used(Block(side, side, 0.5), tokens)) == pytest.approx(share)  # pyright: ignore[reportArgumentType]


@in_turn("machine", MACHINES)
def test_large_products_gain_what_the_rule_says_and_no_zeros_gain_nothing(machine: str) -> None:
    def ratio(pattern: str, tokens: int = 16384) -> float:
        (row,) = twofour.estimate(WIDE, machine=machine, dtype="float16", tokens=tokens, pattern=pattern).rows
        assert row.ratio is not None and row.sparse_mj is not None and row.sparse_mj > 0
        return row.ratio

    assert ratio("block:128x128@0") == pytest.approx(1, abs=0.02)
    assert ratio("block:32x32@0") < 0.7, "narrow tiles cost more than the dense product's"
    dense = explain(machine, "float16", m=16384, n=8192, k=8192)
    # Activations travel as in the dense product: where their time is what is left, no share of blocks shortens it.
    most = dense.seconds[0] / (dense.launch[0] + dense.memory[0])
    assert min(3, 0.8 * most) < ratio("block:128x128@0.9") <= 10.01
    assert ratio("block:16x16@0.9") < ratio("block:32x32@0.9") < ratio("block:64x64@0.9")
    assert 1 < ratio("block:32x32@0.9", tokens=1) <= 10.01


def test_the_estimate_says_its_pattern_and_takes_rims() -> None:
    model = nn.Sequential(nn.Linear(272, 200), nn.ReLU(), nn.Linear(200, 10))
    found = twofour.estimate(model, machine="a100-sxm", tokens=64, pattern="block:32x32@0.75")
    assert found.pattern == found.to_dict()["pattern"] == "block:32x32@0.75"
    assert "ms with every legal weight block:32x32@0.75" in found.summary() and "ms block:32x32@0.75 (" in str(found)
    assert twofour.estimate(model, machine="a100-sxm", tokens=64).pattern == "2:4"


@pytest.mark.parametrize("machine", ["a100-sxm", "h100-sxm"])
def test_dense_groups_are_a_product_of_2_4_on_more_inputs_and_a_pass_over_them(machine: str) -> None:
    def milliseconds(pattern: str, tokens: int = 512) -> float:
        (row,) = twofour.estimate(WIDE, machine=machine, dtype="float16", tokens=tokens, pattern=pattern).rows
        assert row.sparse_ms is not None and row.sparse_mj is not None and row.sparse_mj > 0
        return row.sparse_ms

    wider = nn.Sequential(nn.Linear(10240, 8192, bias=False))  # 8192 inputs, and those of 512 of 2048 groups once more
    (row,) = twofour.estimate(wider, machine=machine, dtype="float16", tokens=512).rows
    found = find(machine)
    passing = (FITTED.launch_of(found) + 512 * (8192 + 10240) * 2 / (found.bandwidth * FITTED.memory)) * 1e3
    assert milliseconds("2:4+25%") == pytest.approx((row.sparse_ms or 0) + passing, rel=1e-6)
    assert milliseconds("2:4") < milliseconds("2:4+10%") < milliseconds("2:4+60%")
    assert milliseconds("2:4+0.001%") == milliseconds("2:4"), "rounded to no group: nothing is copied"


def test_an_estimate_of_the_dial_names_it_and_refuses_what_has_no_rule() -> None:
    model = nn.Sequential(nn.Linear(256, 192), nn.ReLU(), nn.Linear(192, 10))
    found = twofour.estimate(model, machine="a100-sxm", tokens=64, pattern="2:4+25%")
    assert found.pattern == "2:4+25%" and "ms with every legal weight 2:4+25%" in found.summary()
    assert [row.margin for row in found.rows] == [FITTED.margin] * 2 and found.rows[1].sparse_ms is None
    with pytest.raises(HardwareError, match="no unit for the pattern"):
        twofour.estimate(model, machine="a100-sxm", tokens=64, pattern="4:8+25%")
    with pytest.raises(HardwareError, match="training steps with such weights are not priced"):
        twofour.estimate(model, model[0].weight.detach()[:4], machine="a100-sxm", pattern="2:4+25%", training=True)


def test_convolutions_in_groups_of_channels_are_dense_where_no_kernel_has_dense_groups_in_them() -> None:
    model, x = nn.Sequential(nn.Conv2d(64, 64, 3, groups=2), nn.Conv2d(64, 64, 3)).eval(), torch.randn(1, 64, 12, 12)
    grouped, plain = twofour.estimate(model, x, machine="a100-sxm", pattern="2:4+25%").rows
    assert (
        grouped.sparse_ms is None and grouped.reason == "no kernel has dense groups of inputs in 2 groups of channels"
    )
    assert plain.sparse_ms is not None
    for pattern in ("2:4", "block:32x32@0.9"):
        assert twofour.estimate(model, x, machine="a100-sxm", pattern=pattern).rows[0].sparse_ms is not None
    plan = twofour.compile(twofour.prune(model, "2:4+25%", criterion="magnitude"), x, effort="quick").plan
    kernels = {layer.name: layer.kernel for layer in plan.layers}
    assert "hybrid" not in str(kernels["0"])


@pytest.mark.parametrize("pattern", ["block:8x32@0.9", "block:16x4@0.5", "1:4", "64:2:8"])
def test_what_has_no_unit_is_refused(pattern: str) -> None:
    with pytest.raises(HardwareError, match=r"fill no instruction|no unit for the pattern"):
        twofour.estimate(WIDE, machine="a100-sxm", tokens=64, pattern=pattern)
    with pytest.raises(PatternError):
        twofour.estimate(WIDE, machine="a100-sxm", tokens=64, pattern="blocks")
