"""What reads cut channels is ranked and solved by its own matrix and bias: recurrent and transposed layers too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from twofour import calibration, shrinking
from twofour.layers import walk
from twofour.shrinking.curves import bias_of, columns_of, positions
from twofour.shrinking.reconstruct import _normalised
from twofour.structure import shrink as structure

STEPS = torch.randn(64, 5, 4, generator=torch.Generator().manual_seed(0))
PLACES = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """Channels of which half are constant, and a recurrent layer that reads them."""

    def __init__(self, kind: Any, bias: bool) -> None:
        super().__init__()
        self.a, self.r, self.h = nn.Linear(4, 16), kind(16, 8, batch_first=True, bias=bias), nn.Linear(8, 3)
        with torch.no_grad():
            self.a.weight[:8] = 0
            self.a.bias[:8] = torch.rand(8) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.r(self.a(x).relu())[0])


def apart(one: nn.Module, other: nn.Module, x: Tensor) -> float:
    found, want = one(x).detach(), other(x).detach()
    return float((found - want).norm() / want.norm())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_bias_of_a_recurrent_layer_takes_up_constants(kind: Any) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind, True).eval()
    plan = structure.channels(model, STEPS[:2]).plan({"a.weight:0": range(8, 16)})
    (weight,) = [one for one in walk(model, eligibility="any").weights if one.name == "r.weight_ih_l0"]
    assert bias_of(weight) is model.r.bias_ih_l0
    small = twofour.shrink(model, STEPS[:2], 0.75, data=[STEPS], multiple=8, least=0.5, progress=False)
    report = shrinking.report_of(small)
    assert report is not None and "r.weight_ih_l0" in report.reconstructed
    assert report.cut.kept["a.weight", 0] == plan.kept["a.weight", 0], "the constants went"
    assert apart(small, model, STEPS) < 0.5 * apart(structure.cut(model, report.cut), model, STEPS)


def test_a_recurrent_layer_without_a_bias_counts_the_constants() -> None:
    torch.manual_seed(0)
    model = Recurrent(nn.GRU, False).eval()
    small = twofour.shrink(model, STEPS[:2], 0.8, data=[STEPS], multiple=8, least=0.5, progress=False)
    report = shrinking.report_of(small)
    assert report is not None
    (width,) = [one for one in report.widths if one.name == "a.weight:0"]
    assert width.loss > 0.01 or width.after == 16, "a constant that no bias takes up is lost"


def test_a_stopped_search_with_a_recurrent_layer_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM, True).eval()
    options: dict[str, Any] = {"data": [STEPS], "multiple": 8, "progress": False, "checkpoint": tmp_path / "search"}
    first, again = (twofour.shrink(model, STEPS[:2], 0.75, **options) for _ in range(2))
    assert torch.equal(first(STEPS), again(STEPS))


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.up, self.h = nn.Conv2d(3, 16, 1), nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.up(self.a(x).relu()).relu())


@pytest.mark.parametrize("tap", [(0, 0), (1, 1)])
def test_all_taps_of_a_transposed_convolution_count(tap: tuple[int, int]) -> None:
    torch.manual_seed(1)
    model = Up().eval()
    with torch.no_grad():
        model.up.weight[8:] *= 10
        model.up.weight[(slice(8, None), slice(None), *tap)] = 0
    found = structure.channels(model, PLACES[:1])
    (weight,) = [one for one in walk(model, eligibility="any").weights if one.name == "up.weight"]
    columns = columns_of(found.by_name["a.weight:0"], weight)
    matrix = calibration.matrix(weight, model.up.weight.detach())
    assert columns is not None and columns.shape == (16, 4) and matrix.shape[-1] == 64
    assert all(torch.equal(positions(weight)[columns[channel]], torch.full((4,), channel)) for channel in range(16))
    assert float(matrix[0][:, columns[3]].square().sum()) == pytest.approx(
        float(model.up.weight[3].detach().square().sum())
    )
    small = twofour.shrink(model, PLACES[:1], 0.6, data=[PLACES], multiple=1, progress=False)
    report = shrinking.report_of(small)
    assert report is not None
    kept = report.cut.kept["a.weight", 0]
    assert sum(channel >= 8 for channel in kept) >= min(7, len(kept)), kept
    assert apart(small, model, PLACES) < 0.1


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_what_reads_a_cut_stream_is_solved_for_what_the_small_norms_give(norm: Any) -> None:
    """The channels that go are the loudest: norms over those that stay give other numbers."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), Block(norm(32)), Block(norm(32)), norm(32), nn.Linear(32, 8)).eval()
    with torch.no_grad():
        model[0].weight[:8] *= 8
        model[0].bias[:8] += 4
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"data": [x], "samples": 512, "streams": True, "multiple": 1, "progress": False}
    small = twofour.shrink(model, x[:2], 0.6, **options)
    report = shrinking.report_of(small)
    assert report is not None
    merely: Any = structure.cut(model, report.cut)
    assert apart(small, model, x) < 0.95 * apart(merely, model, x)
    seen: dict[str, Tensor] = {}
    for name, net in (("large", model), ("small", merely)):
        net[1].norm.register_forward_hook(lambda _m, _a, output, name=name: seen.update({name: output}))
    kept = list(report.cut.kept["1.norm.weight", 0])
    assert len(kept) < 32
    before = model(x)
    assert not torch.allclose(seen["large"][:, kept], (merely(x), seen["small"])[1], atol=1e-2)
    with _normalised(model, report.cut):
        model[1].norm.register_forward_hook(lambda _m, _a, output: seen.update({"large": output}))
        model(x)
    torch.testing.assert_close(seen["large"][:, kept], seen["small"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(x), before)
