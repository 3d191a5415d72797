"""A budget of time: layers priced by what they take, small models held to what they take, and promises that hold."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import twofour
from tests.shrinking.test_shrink import ROWS, Wide, parameters
from tests.structure.shrink.networks import IMAGE, made
from twofour import shrinking
from twofour.errors import CompileError, ShrinkError
from twofour.shrinking import by_time, times
from twofour.shrinking.budget import Budget, Prices, UnmetError
from twofour.shrinking.choose import choose
from twofour.shrinking.curves import Curve
from twofour.structure import shrink as structure


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be compiled, and every layer takes a millisecond."""

    def compile(*_: object, **__: object) -> nn.Module:
        raise CompileError("no kernel takes it")

    monkeypatch.setattr(times, "compile", compile)
    monkeypatch.setattr(times, "_ms", lambda cells: dict.fromkeys(cells, 1.0))


def test_steps_that_save_nothing_are_passed_over() -> None:
    """Kernels take as long for 64 channels as for 48, and a noisy measurement says more."""
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    found = structure.channels(model, torch.randn(2, 4))
    (group,) = found.groups
    milliseconds = {64: 10.0, 48: 10.2, 32: 5.0, 16: 2.0}
    prices = Prices(found, lambda name, sizes: milliseconds[sizes[0]] if name == "0.weight" else 0.0)
    curve = Curve(torch.arange(64), (64, 48, 32, 16), (0.0, 0.1, 0.2, 0.3), "magnitude")
    assert choose(prices, {group.name: curve}, Budget(time=0.6), 10.0) == {group.name: 32}
    prices = Prices(found, lambda name, sizes: milliseconds[sizes[0]] if name == "0.weight" else 0.0)
    with pytest.raises(UnmetError, match=r"at least 0\.200"):
        choose(prices, {group.name: curve}, Budget(time=0.1), 10.0)


def test_layers_that_differ_in_padding_are_timed_apart(by_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(padded, nn.Conv2d(4, 4, 3, padding=2, dilation=2), nn.Conv2d(4, 4, 3, padding=1))
    x, count = torch.randn(1, 4, 6, 6), iter(range(1, 99))
    monkeypatch.setattr(times, "_ms", lambda cells: {name: next(count) for name in cells})
    grids = times.times(model, x, times.Clock(model, x), (), 99.0).grids
    assert grids["0.weight"].ms == grids["2.weight"].ms != grids["1.weight"].ms


class Tied(nn.Module):
    """A head that is tied to the embedding, which torch names first."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.f, self.g = nn.Embedding(50, 64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.h = nn.Linear(64, 50, bias=False)
        self.h.weight = self.e.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.e(ids)
        return self.h(x + self.g(self.f(x).relu()))


def test_a_tied_weight_is_counted_ranked_and_not_solved(by_torch: None) -> None:
    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(0, 50, (16, 10))
    found = times.times(model, ids, times.Clock(model, ids), (), 9.0)
    assert found.grids.keys() == {"e.weight", "f.weight", "g.weight"} and found.price("e.weight", (50, 32)) > 0
    groups = {group.name: group.group.consumers for group in structure.channels(model, ids).groups}
    assert ("f.weight", "e.weight") in groups.values() or ("e.weight", "f.weight") in groups.values()
    small: Any = twofour.shrink(model, ids[:2], Budget(macs=0.5), data=[ids], least=0.5, streams=True, progress=False)
    report = shrinking.report_of(small)
    assert report is not None and report.macs[0] == 20 * (50 * 64 + 2 * 64 * 128)
    with FlopCounterMode(display=False) as counter:
        small(ids[:2])
    assert 2 * report.macs[1] == counter.get_total_flops() <= 2 * 0.5 * report.macs[0]
    assert small.h.weight is small.e.weight and dict(report.skipped) == {"h.weight": "it is `e.weight` too"}
    (kept,) = (axis.kept for axis in report.cut.axes if ("e.weight", 1) in axis.places)
    assert len(kept) < 64 and torch.equal(small.e.weight, model.e.weight[:, list(kept)])


def test_layers_are_measured_as_compile_makes_them_and_a_side_that_stays_is_measured_whole() -> None:
    torch.manual_seed(0)
    model = Wide()
    clock = times.Clock(model, ROWS[:2])
    assert not clock.reason and clock.told.startswith("compiled in float32")
    whole = clock.ms({"large": clock.large})["large"]
    found = times.times(model, ROWS[:2], clock, {("a.weight", 0), ("b.weight", 1)}, whole)
    assert found.whole == whole > 0 and found.shapes == {"a.weight": (48, 16), "b.weight": (8, 48)}
    rows, columns = found.grids["a.weight"].ms, list(zip(*found.grids["b.weight"].ms, strict=True))
    assert all(row == (row[0],) * 3 for row in rows) and all(column == (column[0],) * 3 for column in columns)
    assert sum(grid.ms[0][0] for grid in found.grids.values()) + sum(found.rest.values()) == pytest.approx(whole)


class Scales:
    """A clock that reads parameters."""

    told = "read off"

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.large = model

    def made(self, model: nn.Module) -> nn.Module:
        return model

    def ms(self, models: dict[str, nn.Module]) -> dict[str, float]:
        return {name: float(parameters(model)) for name, model in models.items()}


@pytest.mark.parametrize("error", [0.5, 1.2])
def test_a_budget_of_time_is_held_to_what_the_model_takes(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are said to cost less or more than they do, so that the first choice is too wide, or too narrow."""
    model, _ = made("mobilenet")
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1}
    grids = {
        name: times.Grid(tuple(tuple(error * a * b * size for b in times.SHARES) for a in times.SHARES))
        for name, size in sizes.items()
    }
    shapes = {name: (model.get_parameter(name).shape[0], model.get_parameter(name).shape[1]) for name in sizes}
    fake = times.Times(float(parameters(model)), grids, dict.fromkeys(sizes, 0.0), shapes, dict.fromkeys(sizes, 1))
    monkeypatch.setattr(by_time, "times", lambda *_: fake)
    monkeypatch.setattr(by_time, "Clock", Scales)
    small = twofour.shrink(model, IMAGE, Budget(time=0.7), multiple=1)
    report = shrinking.report_of(small)
    assert report is not None and report.milliseconds == (float(parameters(model)), float(parameters(small)))
    assert 0.6 * parameters(model) < parameters(small) <= by_time.NEAR * 0.7 * parameters(model)
    assert "read off" in str(report) and report.to_dict()["timing"] == "read off"


def test_a_budget_of_time_that_no_try_meets_is_refused_with_the_least(
    by_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, readings = Wide(), iter([90.0, 85.0, 88.0, 87.0])

    def ms(_: object, models: dict[str, nn.Module]) -> dict[str, float]:
        return {name: 100.0 if name == "large" else next(readings) for name in models}

    monkeypatch.setattr(times.Clock, "ms", ms)
    with pytest.raises(
        ShrinkError, match=r"cannot be met[\s\S]*0\.800 of the time[\s\S]*at least 0\.8[58]0: .* measured"
    ):
        twofour.shrink(model, ROWS[:2], Budget(time=0.8), multiple=1)


def test_what_cannot_be_compiled_is_timed_as_torch_runs_it_and_the_report_says_so(
    by_torch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times.Clock, "ms", lambda _, models: {n: float(parameters(m)) for n, m in models.items()})
    report = shrinking.report_of(twofour.shrink(Wide(), ROWS[:2], Budget(time=0.8), multiple=1))
    assert report is not None and report.timing.startswith("as torch runs it (CompileError: no kernel takes it)")


def test_vectors_say_the_widths_of_a_budget_of_time() -> None:
    model, example = made("mobilenet")
    found = structure.channels(model, example)
    assert {by_time.multiple_of(group) for group in found.groups if group.size < 16} == {None}
    assert {by_time.multiple_of(group) for group in found.groups if 16 <= group.size < 64} == {8}
    flat = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 36, 4))
    assert [by_time.multiple_of(group) for group in structure.channels(flat, IMAGE).groups] == [16]


def test_times_are_interpolated_between_measured_widths() -> None:
    grid = times.Grid(((16.0, 8.0, 4.0), (8.0, 4.0, 2.0), (4.0, 2.0, 1.0)))
    assert grid.at(1, 1) == 16 and grid.at(0.5, 0.25) == 2 and grid.at(0.75, 1) == 12
    assert grid.at(0.375, 0.375) == pytest.approx(16 * 0.375**2) and grid.at(0.125, 1) == 2
    found = times.Times(20.0, {"a": grid}, {"a": 4.0, "b": 2.0}, {"a": (8, 4), "b": (8, 8)}, {"a": 1, "b": 0})
    assert found.price("a", (4, 2, 3, 3)) == 4 + 2 and found.price("b", (8, 4)) == 1 and found.price("c", (8,)) == 0


class Lucky(Scales):
    """A clock that reads a tenth too little the first time that it reads a model."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__(model, example)
        self.seen: set[int] = set()

    def ms(self, models: dict[str, nn.Module]) -> dict[str, float]:
        sizes = {name: parameters(model) for name, model in models.items()}
        lucky = {name: 0.9 if name == "small" and size not in self.seen else 1.0 for name, size in sizes.items()}
        self.seen |= set(sizes.values())
        return {name: lucky[name] * size for name, size in sizes.items()}


def test_a_lucky_measurement_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept as they were first read, models a ninth above the budget would be taken for ones that meet it."""
    model, _ = made("mobilenet")
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1}
    grids = {
        n: times.Grid(tuple(tuple(a * b * size for b in times.SHARES) for a in times.SHARES))
        for n, size in sizes.items()
    }
    shapes = {name: (model.get_parameter(name).shape[0], model.get_parameter(name).shape[1]) for name in sizes}
    fake = times.Times(float(parameters(model)), grids, dict.fromkeys(sizes, 0.0), shapes, dict.fromkeys(sizes, 1))
    monkeypatch.setattr(by_time, "times", lambda *_: fake)
    monkeypatch.setattr(by_time, "Clock", Lucky)
    small = twofour.shrink(model, IMAGE, Budget(time=0.7), multiple=1)
    report = shrinking.report_of(small)
    assert report is not None and report.milliseconds is not None
    promised, truth = report.milliseconds[1] / report.milliseconds[0], parameters(small) / parameters(model)
    assert truth <= 1.04 * 0.7 and promised == pytest.approx(truth, rel=0.04)
