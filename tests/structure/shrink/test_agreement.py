"""The small model is the masked one also where widths differ, numbers are equal by chance, and norms run along."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from twofour import shrinking
from twofour.errors import ShrinkError
from twofour.structure import shrink
from twofour.structure.shrink import AxisCut, Cut
from twofour.structure.shrink.cut import AttributeCut
from twofour.training import gates

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Halves(nn.Module):
    """Two halves of one axis, which go on apart."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.parts = nn.ModuleList(nn.Linear(8, 12) for _ in range(2))
        self.whole, self.out = nn.Linear(8, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([part(x) for part in self.parts], -1) if self.way == "parts" else self.whole(x)
        if self.way == "slices":
            half = h.shape[-1] // 2
            a, b = h[..., :half], h[..., half:]
        else:
            a, b = h.chunk(2, -1)
        return self.out(torch.cat([a.relu(), b.tanh()], -1))


@pytest.mark.parametrize("way", ["chunk", "slices", "parts"])
def test_halves_of_an_axis_get_one_width(way: str) -> None:
    torch.manual_seed(0)
    model = Halves(way).eval()
    found = shrink.channels(model, X)
    names = tuple(group.name for group in found.groups)
    assert len(names) == 2 and found.tied == (names,) and found.bound == [list(found.groups)]
    with pytest.raises(ShrinkError, match="divides evenly") as caught:
        found.plan({names[0]: range(6)})
    assert caught.value.layer == names[0] and "6 and 12" in str(caught.value.got)
    plan = found.plan({names[0]: range(6), names[1]: [0, 2, 4, 6, 8, 10]})
    torch.testing.assert_close(shrink.cut(model, plan)(X), shrink.masked(model, plan)(X), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        for half in [model.whole.weight[12:], model.parts[1].weight]:
            half *= 0.05  # by themselves all of these would go
    small = twofour.shrink(model, X, 0.8 if way == "parts" else 0.7, multiple=1)
    report = shrinking.report_of(small)
    assert report is not None and report.widths[0].after == report.widths[1].after < 12
    torch.testing.assert_close(small(X), shrink.masked(model, report.cut)(X), rtol=1e-5, atol=1e-6)


def test_gates_leave_halves_of_an_axis_alike() -> None:
    torch.manual_seed(0)
    model = Halves("chunk")
    held: Any = gates.attach(model, X, steps=1, multiple=1)
    with torch.no_grad():
        for gated, count in zip(held._gated, (8, 4), strict=True):
            gated.held[0][0][:count] = 0
    held.finish().eval()
    assert set(gates.learned(model).widths.values()) == {(12, 8)}
    torch.testing.assert_close(gates.cut(model, X)(X), model(X), rtol=1e-5, atol=1e-6)


def test_groups_of_two_channels_are_tried_apart() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(8, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.fc(x).chunk(2, -1)
            return self.out(torch.cat([a.relu(), b.tanh()], -1))

    found = shrink.channels(Two().eval(), X)
    assert [group.size for group in found.groups] == [2, 2] and len(found.tied) == 1


class Thirds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 20), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        cut = h.shape[-1] * 2 // 5
        return self.out(torch.cat([h[..., :cut].relu(), h[..., cut:].tanh()], -1))


def test_shares_that_are_not_equal_stay_whole() -> None:
    found = shrink.channels(Thirds().eval(), X)
    assert not found.groups and any("an output differs" in uncut.reason for uncut in found.uncut)


def test_a_plan_that_computes_something_else_is_refused_by_the_name_of_its_channels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4)).eval()
    found = shrink.channels(model, X)
    good = found.plan({"0.weight:0": range(6), "2.weight:0": [1, 3]})
    shrink.verify(model, good, X)
    shrink.verify(model, good, X, found)
    hidden, last = good.axes
    places = tuple(place for place in last.places if place != ("4.weight", 1))
    wrong = Cut((hidden, AxisCut(6, last.kept, places), AxisCut(6, (0, 5), (("4.weight", 1),))))
    with pytest.raises(ShrinkError, match="would compute something else") as caught:
        shrink.verify(model, wrong, X)
    assert "an output differs by" in str(caught.value.got)
    with pytest.raises(ShrinkError, match="does not run on the example"):
        shrink.verify(model, good, X[:, :5])


def test_a_wrong_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that took halves for channels of their own, as one that knew nothing of the forward would."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), Halves("chunk")).eval()
    found = shrink.channels(model, X)
    monkeypatch.setattr(shrink.Channels, "tied", property(lambda self: ()))
    with pytest.raises(ShrinkError, match="would compute something else") as caught:
        kept = {"0.weight:0": range(9), "3.whole.weight:0": range(5)}
        shrink.verify(model, found.plan(kept), X, found)
    assert caught.value.layer == "3.whole.weight:0"


def test_gates_that_left_a_wrong_plan_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `twofour.shrink` does: nothing that is closed is missed, the forward takes halves of what stays."""
    torch.manual_seed(0)
    model = Halves("chunk")
    held: Any = gates.attach(model, X, steps=1, multiple=1)
    monkeypatch.setattr(type(held._found), "tied", property(lambda self: ()))
    with torch.no_grad():
        for gated, count in zip(held._gated, (8, 4), strict=True):
            gated.held[0][0][:count] = 0
    held.finish().eval()
    assert set(gates.learned(model).widths.values()) == {(12, 4), (12, 8)}
    with pytest.raises(ShrinkError, match="would compute something else"):
        gates.cut(model, X)


class Limited(nn.Module):
    """A number that is equal to a width, and has nothing to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.max_len, self.up, self.down = 64, nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x[:, : self.max_len]).relu())


def test_numbers_that_the_forward_does_not_need_stay() -> None:
    model = Limited().eval()
    small: Any = twofour.shrink(model, torch.randn(2, 10, 8), 0.6)
    assert small.up.out_features < 64 == small.max_len and small(torch.randn(2, 60, 8)).shape == (2, 60, 4)


class Block(nn.Module):
    """A pre-norm block whose hidden width is the stream's, with a number that nothing uses."""

    def __init__(self, norm: nn.Module, size: int = 64) -> None:
        super().__init__()
        self.dim, self.norm = size, norm
        self.up, self.down = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def blocks(norm: Any = nn.LayerNorm, scale: int = 1) -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Linear(8, 64), Block(norm(64)), Block(norm(64)), nn.Linear(64, 4), Scale(scale)]
    return nn.Sequential(*parts).eval()


class Scale(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        return x * self.window


def test_a_number_that_nothing_needs_ties_no_groups() -> None:
    model = blocks()
    found = shrink.channels(model, X)
    assert [group.attributes for group in found.groups] == [(), (), ()] and not found.bound
    small: Any = twofour.shrink(model, X, 0.8)
    assert small[1].up.out_features < 64 == small[1].dim


class RootMeanSquare(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class ByHand(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(size) + 0.5), nn.Parameter(torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.scale * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() + self.shift


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, RootMeanSquare, ByHand])
def test_all_but_the_norms_along_a_stream_is_compared(norm: Any) -> None:
    model = blocks(norm, scale=64)
    found = shrink.channels(model, X)
    stream = found.by_name["0.weight:0"]
    assert not stream.exact and stream.attributes == ()
    small: Any = twofour.shrink(model, X, 0.6, streams=True, multiple=16)
    assert small[0].out_features < 64 == small[4].window
    plan = found.plan({"0.weight:0": range(40)})
    shrink.verify(model, plan, X, found)
    (axis,) = plan.axes
    others = tuple(place for place in axis.places if place != ("3.weight", 1))
    edited = Cut((AxisCut(64, axis.kept, others), AxisCut(64, tuple(range(20, 60)), (("3.weight", 1),))))
    with pytest.raises(ShrinkError, match="would compute something else"):
        shrink.verify(model, edited, X, found)


def test_a_shortage_of_memory_is_no_reason_to_leave_channels_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("twofour.structure.shrink.trial.masked", short)
    with pytest.raises(MemoryError):
        shrink.channels(Limited().eval(), torch.randn(2, 10, 8))


class Follows(nn.Module):
    """Layers of which each one's number is taken from its place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scales = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), (1.0, 2.0, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x + self.scales[index] * layer(x)
        return x


def test_a_layer_whose_place_in_the_list_counts_is_not_dropped_unseen() -> None:
    model = Follows().eval()
    with pytest.raises(ShrinkError, match="would compute something else") as caught:
        shrink.verify(model, Cut(layers=("layers.0",)), X)
    assert caught.value.layer == "layers.0"


def test_layers_that_work_in_place_are_dropped() -> None:
    class InPlace(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x += super().forward(x)
            return x

    model = nn.Sequential(nn.Linear(8, 8), InPlace(8, 8), InPlace(8, 8), nn.Linear(8, 4)).eval()
    shrink.verify(model, Cut(layers=("1",)), X)


def test_a_normalisation_without_tensors_counts_its_channels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 3, 5, 5)
    small: Any = twofour.shrink(model, x, 0.7, multiple=1)
    assert small[1].num_features == small[0].out_channels < 8
    assert small(x).shape == model(x).shape  # torch warns of another number of channels
    again = shrink.cut(model, shrink.Cut.from_text(shrink.cuts_of(small)[-1].to_text()))
    assert again.get_submodule("1").num_features == small[1].num_features


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_along_a_stream_that_has_no_tensors_goes_along(norm: Any, tmp_path: Path) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return blocks(lambda size: norm(size, elementwise_affine=False), scale=64).eval()

    model = made()
    small: Any = twofour.shrink(model, X, 0.6, streams=True, multiple=16)
    width = small[0].out_features
    norms = [part for part in small.modules() if isinstance(part, norm)]
    assert width < 64 and norms and all(part.normalized_shape == (width,) for part in norms)
    assert all(part.normalized_shape == (64,) for part in model.modules() if isinstance(part, norm))
    twofour.save(small, tmp_path / "small.safetensors")
    again = twofour.load(tmp_path / "small.safetensors", made(), masked=True)
    torch.testing.assert_close(again.eval()(X), small(X))
    with pytest.raises(ShrinkError, match=r"`normalized_shape` = \(64,\) in the model, 32 in the plan"):
        shrink.cut(made(), Cut(attributes=(AttributeCut("1.norm", "normalized_shape", 32, 16),)))


def test_an_entry_that_stands_in_a_list_twice_may_go_once() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(layer, layer), nn.Linear(8, 4)).eval()
    small: Any = twofour.shrink(model, X, 0.99, layers=["1.1"], multiple=1)
    assert len(small[1]) == 1
    with pytest.raises(ShrinkError, match="a module that the model lacks"):
        shrink.cut(model, Cut(layers=("1.2",)))
