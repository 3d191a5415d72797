"""What reads cut channels is ranked and solved by its own matrix and bias: recurrent and transposed layers too."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from twofour import calibration, shrinking
from twofour.calibration import Batch
from twofour.layers import walk
from twofour.shrinking.curves import Reader, bias_of, columns_of, positions
from twofour.shrinking.depth import energies
from twofour.shrinking.reconstruct import _normalised, refit_norms
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


def test_readers_of_one_group_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Reader] = weakref.WeakSet()
    counts: list[int] = []
    make = Reader.of

    def counted(*args: Any) -> Reader:
        reader = make(*args)
        alive.add(reader)
        counts.append(len(alive))
        return reader

    monkeypatch.setattr(Reader, "of", counted)
    torch.manual_seed(0)
    layers = [part for _ in range(5) for part in (nn.Linear(16, 16), nn.ReLU())]
    x = torch.randn(64, 16)
    small = twofour.shrink(nn.Sequential(*layers, nn.Linear(16, 4)), x[:2], 0.7, data=[x], progress=False)
    report = shrinking.report_of(small)
    assert report is not None and {width.source for width in report.widths} == {"second-order"}
    assert len(counts) == 5 and max(counts) <= 2


def test_a_forward_that_changes_its_input_leaves_the_data() -> None:
    class Doubles(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    x = torch.randn(64, 4)
    before, model = x.clone(), Doubles(nn.BatchNorm1d(4), nn.Linear(4, 4))
    assert refit_norms(model, [Batch(x)]) == 1 and torch.equal(x, before)
    energies(model, [], [], [Batch(x)])
    assert torch.equal(x, before)


def test_what_stays_whole_unasked_is_in_the_report() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), Block(nn.LayerNorm(32)), nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 4)
    ).eval()
    x = torch.randn(4, 16)
    report = shrinking.report_of(twofour.shrink(model, x, 0.9, multiple=8))
    assert report is not None and [width.name for width in report.widths] == ["1.up.weight:0"]
    reasons = {uncut.names[0]: uncut.reason for uncut in report.uncut}
    assert "streams=True cuts it" in reasons["0.weight"] and "the only width" in reasons["2.weight"]
    flat = nn.Sequential(nn.Linear(16, 32), Sum(), nn.Linear(32, 4)).eval()
    report = shrinking.report_of(twofour.shrink(flat, x, 0.7, multiple=8))
    assert report is not None
    assert {uncut.names[0]: uncut.reason for uncut in report.uncut}["0.weight"].startswith("a residual stream")


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def test_groups_of_one_width_with_one_that_stays_whole_are_in_the_report() -> None:
    class Counted(nn.Module):
        """A hidden width and a stream that one number counts."""

        def __init__(self) -> None:
            super().__init__()
            self.width, self.inner = 32, Sum()
            self.ups = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
            self.downs = nn.ModuleList(nn.Linear(32, 4) for _ in range(2))
            self.wide, self.out = nn.Linear(16, 64), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            first = self.ups[0](x).relu().view(-1, self.width)
            second = self.inner(self.ups[1](x)).view(-1, self.width)
            return self.downs[0](first) + self.downs[1](second) + self.out(self.wide(x).relu())

    torch.manual_seed(0)
    model, x = Counted().eval(), torch.randn(4, 16)
    found = structure.channels(model, x)
    report = shrinking.report_of(twofour.shrink(model, x, 0.8, multiple=8))
    assert report is not None
    cut, whole = {width.name for width in report.widths}, {name for uncut in report.uncut for name in uncut.names}
    assert all(group.name in cut or group.group.places[0].name in whole for group in found.groups)
