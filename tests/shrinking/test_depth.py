"""depth: whole layers go where they add less for what they save than channels would lose."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.structure.shrink.networks import made
from twofour import shrinking
from twofour.errors import ShrinkError
from twofour.shrinking.depth import droppable
from twofour.structure import shrink as structure

ROWS = torch.randn(128, 16, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    """x + b(relu(a(x)))."""

    def __init__(self, adds: float, own: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)
        with torch.no_grad():
            self.a.weight.copy_(self.a.weight[torch.arange(64) % own])
            self.a.bias.copy_(self.a.bias[torch.arange(64) % own])
            self.b.weight.mul_(adds)
            self.b.bias.mul_(adds)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).relu())


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


def test_layers_that_add_little_go_and_the_others_keep_their_channels() -> None:
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


def test_without_data_no_layer_can_be_chosen() -> None:
    with pytest.raises(ShrinkError, match=r'no layer can be chosen[\s\S]*layers="auto" without data'):
        twofour.shrink(stack((1.0, 1.0)), ROWS[:2], 0.6, layers="auto")
