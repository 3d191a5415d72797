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
from tests.turns import in_turn
from twofour import calls, shrinking
from twofour.calibration import Batch
from twofour.errors import ShrinkError
from twofour.shrinking.budget import Budget, Prices, UnmetError, uses
from twofour.shrinking.curves import Reader
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


EACH = [("densenet", "parameters"), ("tagger", "macs"), ("gpt2", "parameters")]
EACH += [("mobilenet", kind) for kind in ("parameters", "macs", "bytes")]
OTHERS = [("densenet", "macs"), ("tagger", "parameters"), ("gpt2", "macs")]
"""Every network meets a budget of one kind, and one network those of every kind; pairs that are left are long."""


@in_turn(("name", "kind"), EACH)
def test_a_budget_is_met_and_the_report_counts_what_is_there(name: str, kind: str) -> None:
    assert_met(name, kind)


@pytest.mark.long
@in_turn(("name", "kind"), OTHERS)
def test_every_other_budget_is_met(name: str, kind: str) -> None:
    assert_met(name, kind)


def assert_met(name: str, kind: str) -> None:
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
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
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


@in_turn("budget", [0, 1, -0.5, 2, True, None, "half", float("nan")])
def test_impossible_budgets_are_refused(budget: Any) -> None:
    with pytest.raises(ShrinkError, match="the budget is impossible"):
        twofour.shrink(Wide(), ROWS[:2], budget)


@in_turn(
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
