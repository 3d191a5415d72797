"""shrink: budgets are met, what is solved anew is the least squares of what stays, and refusals say what can be."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import twofour
from tests.structure.shrink.networks import IMAGE, MobileNet, made
from twofour import calls, shrinking
from twofour.calibration import Batch
from twofour.errors import CompileError, ShrinkError
from twofour.shrinking import by_time, times
from twofour.shrinking.budget import Budget, Prices, UnmetError, uses
from twofour.shrinking.choose import choose
from twofour.shrinking.curves import Curve, Reader
from twofour.shrinking.reconstruct import refit_norms
from twofour.structure import shrink as structure
from twofour.structure.shrink.widths import widths_of


class Wide(nn.Module):
    """Two layers whose hidden channels are some of a few numbers: most of them can go without any loss."""

    def __init__(self, own: int = 12, size: int = 48) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, size), nn.Linear(size, 8)
        with torch.no_grad():
            self.a.weight[own:] = self.a.weight[torch.arange(size - own) % own]
            self.a.bias[own:] = self.a.bias[torch.arange(size - own) % own]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


ROWS = torch.randn(256, 16, generator=torch.Generator().manual_seed(3))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ("mobilenet", "densenet", "tagger", "gpt2") for kind in ("parameters", "macs")]
    + [("mobilenet", "bytes")],
)
def test_a_budget_is_met_and_the_report_counts_what_is_there(name: str, kind: str) -> None:
    if name == "gpt2":
        pytest.importorskip("transformers", reason="needs the extra [text]")
    model, example = made(name)
    small = twofour.shrink(model, example, Budget(**{kind: 0.8}), least=0.1)
    report = shrinking.report_of(small)
    assert report is not None
    assert report.parameters == (parameters(model), parameters(small))
    assert report.macs == tuple(
        sum(p.numel() * uses(m, example).get(n, 0) for n, p in m.named_parameters()) for m in (model, small)
    )
    assert report.bytes == tuple(sum(p.nbytes for p in net.parameters()) for net in (model, small))
    before, after = getattr(report, kind)
    assert after <= 0.8 * before and after > 0.5 * before
    with calls.without_cache(small):
        calls.call(small, calls.fresh(example))
    assert str(report).startswith("parameters ") and structure.cuts_of(small)[-1] == report.cut


def test_prices_are_those_of_the_model_that_is_cut() -> None:
    model, example = made("densenet")
    found = structure.channels(model, example)
    prices = Prices(found, lambda _, sizes: math.prod(sizes))
    assert prices.total == parameters(model)
    kept = {}
    for group in found.groups:
        width = max(1, group.size // 2)
        before = prices.total
        assert prices.set(group, width) == before - prices.total
        kept[group.name] = range(width)
    assert prices.total == parameters(structure.cut(model, found.plan(kept)))


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


class Across(nn.Module):
    """Attention over a memory that is longer than what asks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.attention(x, memory, memory, need_weights=False)[0]


def test_products_of_attention_are_those_of_what_it_reads() -> None:
    found = uses(Across(), (torch.randn(2, 3, 8), torch.randn(2, 9, 8)))
    assert found["attention.in_proj_weight"] * 3 * 8 * 8 == 2 * (3 + 9 + 9) * 8 * 8


@pytest.mark.parametrize("name", ["mobilenet", "gpt2"])
def test_products_are_counted_as_torch_counts_them(name: str) -> None:
    """GPT-2 has a head that is tied to the embedding."""
    if name == "gpt2":
        pytest.importorskip("transformers", reason="needs the extra [text]")
    model, example = made(name)
    times = uses(model, example)
    with FlopCounterMode(display=False) as counter, calls.evaluating(model), calls.without_cache(model):
        calls.call(model, calls.fresh(example))
    flops = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    of_weights = sum(count for op, count in flops.items() if op in ("aten.mm", "aten.addmm", "aten.convolution"))
    named = dict(model.named_parameters())
    assert 2 * sum(named[name].numel() * count for name, count in times.items()) == of_weights
    assert name != "gpt2" or "transformer.wte.weight" in times


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


def test_layers_that_differ_in_padding_are_timed_apart(by_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(padded, nn.Conv2d(4, 4, 3, padding=2, dilation=2), nn.Conv2d(4, 4, 3, padding=1))
    x, count = torch.randn(1, 4, 6, 6), iter(range(1, 99))
    monkeypatch.setattr(times, "_ms", lambda cells: {name: next(count) for name in cells})
    grids = times.times(model, x, times.Clock(model, x), (), 99.0).grids
    assert grids["0.weight"].ms == grids["2.weight"].ms != grids["1.weight"].ms


@pytest.mark.parametrize(("size", "unit"), [(12, 1), (32, 8), (100, 8), (128, 16), (200, 16)])
def test_widths_are_multiples_of_what_kernels_like(size: int, unit: int) -> None:
    widths = widths_of(size, None, 0.25)
    assert widths[0] == size and widths[-1] >= size / 4 and list(widths) == sorted(set(widths), reverse=True)
    assert all(width % unit == 0 for width in widths[1:])
    assert widths_of(size, 5, 0.5)[-1] % 5 == 0
    assert widths_of(3, 8, 0.1) == (3,), "narrower than a multiple that was asked for: whole"
    assert widths_of(12, None, 0.3)[-1] == 4 and widths_of(25, None, 0.28)[-1] == 7


def test_what_a_reader_loses_is_the_least_squares_of_what_stays() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 12, generator=generator, dtype=torch.float64) @ torch.randn(
        12, 12, generator=generator, dtype=torch.float64
    )
    layer = nn.Linear(12, 5, bias=False).double()
    weight = twofour.layers.walk(layer, eligibility="any").weights[0]
    columns = torch.arange(12).view(6, 2)
    reader = Reader.of(weight, columns, x.T @ x)
    alive = torch.arange(6)
    first = reader.losses(alive)
    lost = [reader.remove(torch.tensor([4])), reader.remove(torch.tensor([0, 3]))]
    y = x @ layer.weight.detach().T

    def error(gone: list[int]) -> float:
        stay = columns[[c for c in range(6) if c not in gone]].flatten()
        best = torch.linalg.lstsq(x[:, stay], y).solution
        return float((y - x[:, stay] @ best).square().sum() / y.square().sum())

    assert [float(one) for one in first] == pytest.approx([error([c]) for c in range(6)], rel=1e-6)
    assert lost[0] == pytest.approx(error([4]), rel=1e-6)
    assert sum(lost) == pytest.approx(error([4, 0, 3]), rel=1e-6)


def test_channels_that_others_can_stand_for_go_without_loss() -> None:
    torch.manual_seed(0)
    model = Wide()
    small: Any = twofour.shrink(model, ROWS[:2], 0.36, data=[ROWS], samples=256, multiple=4, progress=False)
    alone: Any = twofour.shrink(model, ROWS[:2], 0.36, multiple=4)
    assert small.a.out_features == small.b.in_features <= 16
    large = model(ROWS).detach()
    errors = [float((net(ROWS).detach() - large).norm() / large.norm()) for net in (small, alone)]
    assert errors[0] < 0.03 < errors[1]
    report = shrinking.report_of(small)
    assert report is not None and report.reconstructed == ("b.weight",) and report.widths[0].source == "second-order"


def test_constants_that_go_are_taken_up_by_the_next_bias() -> None:
    torch.manual_seed(0)
    model = Wide(48)
    with torch.no_grad():
        model.a.weight[::2] = 0
        model.a.bias[::2] = torch.rand(24) + 0.5
    small: Any = twofour.shrink(model, ROWS[:2], 0.53, data=[ROWS[:128]], multiple=8, progress=False)
    assert small.a.out_features == 24
    torch.testing.assert_close(small(ROWS), model(ROWS), rtol=1e-5, atol=1e-5)


def test_batch_norms_that_keep_their_statistics_are_said() -> None:
    model, _ = made("mobilenet")
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    said = {}
    for name, data in (("none", None), ("fit", [x])):
        report = shrinking.report_of(twofour.shrink(model, IMAGE, 0.9, data=data, progress=False))
        assert report is not None
        said[name] = report.notes
        assert report.to_dict()["notes"] == list(report.notes) and all(note in str(report) for note in report.notes)
    assert said == {"none": (said["none"][0],), "fit": ()}
    assert "batch norms keep the means and variances of the large model: there are no calibration" in said["none"][0]


@torch.no_grad()
def test_batch_norms_that_the_data_do_not_reach_keep_their_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Identity())
    model[1].spare = nn.BatchNorm1d(3)  # no forward calls it
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    for norm in norms:
        norm.running_mean.fill_(5.0)
        norm.num_batches_tracked.fill_(7)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def means() -> list[float]:
        return [float(norm.running_mean[0]) for norm in norms]

    assert refit_norms(model, [Batch(x[:1])]) == 0 and means() == [5.0, 5.0], "one sample has no variance"
    assert all(int(norm.num_batches_tracked) == 7 and norm.momentum == 0.1 for norm in norms)
    assert refit_norms(model, [Batch(x)]) == 1
    assert means() == [pytest.approx(float(x[:, 0].mean()), rel=1e-5), 5.0]


def test_batch_norms_take_their_statistics_anew() -> None:
    model, _ = made("mobilenet")
    x = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    small: Any = twofour.shrink(model, IMAGE, 0.7, data=[x[:32], x[32:]], progress=False)
    again = [module for module in small.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(int(norm.num_batches_tracked) == 2 and not norm.training for norm in again)
    assert again[0].momentum == 0.1
    seen: list[Tensor] = []
    small.features[0][0].register_forward_hook(lambda _m, _a, out: seen.append(out))
    small(x)
    torch.testing.assert_close(again[0].running_mean, seen[0].mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_residual_streams_are_cut_on_request_and_layers_that_are_named() -> None:
    model, example = made("mobilenet")
    small: Any = twofour.shrink(model, example, 0.6, streams=True, layers=["features.3"])
    report = shrinking.report_of(small)
    assert report is not None and len(small.features) == 3
    assert report.parameters[0] == parameters(model) and report.parameters[1] <= 0.6 * parameters(model)
    assert {width.name for width in report.widths} >= {"features.0.0.weight:0"}
    fresh = MobileNet()
    for plan in structure.cuts_of(small):
        fresh = structure.cut(fresh, plan)
    fresh.load_state_dict(small.state_dict())


def test_residual_streams_go_where_the_budget_cannot_be_met_without() -> None:
    model, example = made("mobilenet")
    with pytest.raises(UnmetError) as caught:
        twofour.shrink(model, example, 0.01, streams=False)
    for budget, cut in ((caught.value.least + 0.01, False), (caught.value.least - 0.05, True)):
        small = twofour.shrink(model, example, budget)
        report = shrinking.report_of(small)
        assert report is not None and report.parameters[1] <= budget * report.parameters[0]
        assert cut == any("residual streams were cut too" in note for note in report.notes)
        assert cut == any(w.name == "features.0.0.weight:0" and w.after < w.before for w in report.widths)


def test_a_budget_that_cannot_be_met_says_the_least() -> None:
    model, example = made("mobilenet")
    with pytest.raises(ShrinkError, match=r"the budget cannot be met[\s\S]*at least 0\.\d+") as caught:
        twofour.shrink(model, example, 0.01)
    least = float(str(caught.value.wanted).split()[2].rstrip(":"))
    small = twofour.shrink(model, example, least + 0.001)
    assert parameters(small) <= (least + 0.001) * parameters(model)
    with pytest.raises(ShrinkError, match="nothing can be cut"):
        twofour.shrink(nn.Linear(4, 4), torch.randn(2, 4), 0.5)


@pytest.mark.parametrize("budget", [0, 1, -0.5, 2, True, None, "half", float("nan")])
def test_impossible_budgets_are_refused(budget: Any) -> None:
    with pytest.raises(ShrinkError, match="the budget is impossible"):
        twofour.shrink(Wide(), ROWS[:2], budget)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Budget(parameters=0.5, macs=0.5),
        lambda: Budget(),
        lambda: twofour.shrink(Wide(), ROWS[:2], 0.5, multiple=0),
        lambda: twofour.shrink(Wide(), ROWS[:2], 0.5, least=0),
        lambda: twofour.shrink(Wide(), ROWS[:2], 0.5, layers=["c"]),
        lambda: twofour.shrink(Wide(), ROWS[:2], 0.5, layers="a"),
        lambda: twofour.shrink(nn.Sequential(nn.Linear(16, 16), Wide()), ROWS[:2], 0.5, layers="0"),
        lambda: twofour.shrink(Wide(), ROWS[:2], 0.5, samples=0),
        lambda: twofour.shrink(Wide(), ROWS[:2], 0.5, streams="some"),  # type: ignore[arg-type]
        lambda: twofour.shrink(Wide(), torch.randn(2, 3), 0.5),
    ],
)
def test_impossible_options_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ShrinkError):
        call()


def test_the_small_model_is_pruned_compiled_and_estimated() -> None:
    torch.manual_seed(0)
    small = twofour.shrink(Wide(48, 64), ROWS[:2], 0.6)
    twofour.prune(small, "2:4", eligibility="any")
    assert twofour.check(small).ok
    fast = twofour.compile(small, ROWS, graph=False)
    torch.testing.assert_close(fast(ROWS), small(ROWS), rtol=1e-4, atol=1e-4)
    assert twofour.estimate(small, tokens=256, machine="a100-sxm")


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


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be compiled, and every layer takes a millisecond."""

    def compile(*_: object, **__: object) -> nn.Module:
        raise CompileError("no kernel takes it")

    monkeypatch.setattr(times, "compile", compile)
    monkeypatch.setattr(times, "_ms", lambda cells: dict.fromkeys(cells, 1.0))


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
