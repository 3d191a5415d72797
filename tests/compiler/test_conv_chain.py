"""Convolutions in a row through compile: which become one call, which stay, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import twofour
from tests.compiler.small import quick
from twofour.compiler import conv_chain, graph
from twofour.compiler.conv_chain import APART, IN_A_CHAIN, STRIPS, WHOLE
from twofour.compiler.graph_conv import ConvLayer

FAST = {APART: 1.0, WHOLE: 0.9, STRIPS: 0.8}
RACE = conv_chain._race


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times by which a graph, and a call by strips, always pay: nothing here depends on a clock."""
    monkeypatch.setattr(graph, "_engines", lambda *_: ({"layers": 2.0, "graph": 1.0}, 0.0))
    monkeypatch.setattr(conv_chain, "_race", lambda *_: (FAST, True))


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.down, self.middle, self.up = conv(inputs, width, 1), conv(width, width, 3), conv(width, inputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.middle(torch.relu(self.down(x))))
        return torch.relu(self.up(y) + x)


class Inverted(nn.Module):
    """Expand, a filter for each channel, project; the sum before it is read by one convolution alone."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.expand, self.taps = conv(inputs, 2 * inputs, 1), conv(2 * inputs, 2 * inputs, 5, 2, 2 * inputs)
        self.project = conv(2 * inputs, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        silu = nn.functional.silu
        return self.project(silu(self.taps(silu(self.expand(x)))))


def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every convolution run on a kernel of ours, and 2:4 ones on a sparse one."""
    from twofour.compiler import choose_conv

    def pick(times: dict[str, float], memory: str, **_: bool) -> object:
        kernels = [kernel for kernel in choose_conv.convolutions() if kernel.name in times and kernel.isa != "any"]
        return max(kernels, key=lambda kernel: (kernel.sparse, kernel.name))

    monkeypatch.setattr(choose_conv, "pick", pick)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_block_is_one_call(monkeypatch: pytest.MonkeyPatch, sparse: bool, tmp_path: Path) -> None:
    ours(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(Bottleneck(16, 8), Bottleneck(16, 8), Inverted(16), nn.Flatten()).eval()
    if sparse:
        twofour.prune(model, "2:4")
    x = torch.randn(2, 16, 14, 10)
    fast = quick(model, x, graph=True)
    account = fast.plan.account
    assert account.rewrites[IN_A_CHAIN] == 3, str(fast.plan)
    assert {entry.operator for entry in account.after} >= {
        "conv+relu, conv+relu, conv+add+relu",
        "conv+silu, conv+silu, conv",
    }
    assert account.calls is not None and account.calls.native >= 3
    twofour.save(fast, tmp_path / "model.tf")
    again = twofour.load(tmp_path / "model.tf", model, example=x)
    for other in (x, x[:1], torch.randn(3, 16, 9, 11), x.to(memory_format=torch.channels_last), -x):
        want = model(other) if other.shape[2:] == x.shape[2:] else None
        for one in (fast, again):
            if want is not None:
                torch.testing.assert_close(one(other), want, atol=1e-4, rtol=1e-4)
    assert fast.plan.error < 1e-5


def test_what_others_read_ends_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    ours(monkeypatch)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (conv(8, 8, 3) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = self.b(y)
            return self.c(z) + self.d(y)  # `y` has two readers, so that a chain begins behind it

    x = torch.randn(1, 8, 6, 6)
    model = Shared().eval()
    fast = quick(model, x, graph=True)
    assert fast.plan.account.rewrites[IN_A_CHAIN] == 1, str(fast.plan)
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)


def test_a_slower_call_is_not_made_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ours(monkeypatch)
    monkeypatch.setattr(conv_chain, "_race", lambda *_: ({APART: 1e-3, WHOLE: 1.06e-3, STRIPS: 2e-3}, 0.0))
    model, x = nn.Sequential(conv(12, 12, 3), conv(12, 12, 3)).eval(), torch.randn(1, 12, 6, 6)
    fast = quick(model, x, graph=True)
    assert fast.plan.account.rewrites[IN_A_CHAIN] == 0
    assert "`0` and `1` take 1.060 ms in one call, 1.000 ms apart" in str(fast.plan)
    monkeypatch.setattr(conv_chain, "_race", lambda *_: ({APART: 1e-3, WHOLE: 1.04e-3, STRIPS: 2e-3}, 0.0))
    tied = quick(model, x[..., :5], graph=True)
    assert tied.plan.account.rewrites[IN_A_CHAIN] == 1, "a tie goes to the call that saves calls and bytes"


def test_a_race_is_of_the_calls_that_a_graph_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ours(monkeypatch)
    seen: list[dict[str, float]] = []

    def watched(nodes: list[fx.Node], layers: list[ConvLayer]) -> tuple[dict[str, float], float]:
        seen.append(RACE(nodes, layers)[0])
        return FAST, True

    monkeypatch.setattr(conv_chain, "_race", watched)
    monkeypatch.setattr(conv_chain, "SECONDS", 0.001)
    quick(nn.Sequential(Bottleneck(16, 8)).eval(), torch.randn(1, 16, 8, 8), graph=True)
    (times,) = seen
    assert set(times) == {APART, WHOLE, STRIPS} and all(seconds > 0 for seconds in times.values())


def test_sizes_whose_rows_read_zeros_alone_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ours(monkeypatch)
    model = nn.Sequential(conv(4, 4, 1), nn.Conv2d(4, 4, 3, stride=(4, 1), padding=1)).eval()
    x = torch.randn(2, 4, 12, 6)
    fast = quick(model, x, graph=True)
    assert fast.plan.account.rewrites[IN_A_CHAIN] == 1, str(fast.plan)
    for other in (x, torch.randn(2, 4, 4, 6)):
        torch.testing.assert_close(fast(other), model(other), atol=1e-4, rtol=1e-4)
