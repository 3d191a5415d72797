"""Constants that a cut leaves go on in biases, or the cut is refused by the name of the layer that would lose them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twofour.errors import ShrinkError
from twofour.structure import shrink

IMAGE = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
STEPS = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))


def convolutional(reader: nn.Module, closed: list[int]) -> nn.Module:
    """Channels that a batch norm has closed, to be read by a layer."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    with torch.no_grad():
        norm.bias.fill_(1.0)
        norm.weight[closed] = 0
    return nn.Sequential(nn.Conv2d(3, 8, 1), norm, nn.ReLU(), reader).eval()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.d = nn.Linear(3, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.d.weight = self.c.weight
        with torch.no_grad():
            self.a.weight[:4], self.a.bias[:4] = 0, 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.c(h) * self.d(h).sigmoid()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.r, self.h = nn.Linear(3, 8), nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 2)
        with torch.no_grad():
            self.a.weight[:4], self.a.bias[:4] = 0, 1

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.r(self.a(x).relu())[0])


@pytest.mark.parametrize(
    ("make", "x", "layer"),
    [
        (lambda: convolutional(nn.ConvTranspose2d(8, 4, 1), [0, 1, 2, 3]), IMAGE, "3"),
        (lambda: convolutional(nn.Conv2d(8, 4, 1, groups=2), [0, 1, 4, 5]), IMAGE, "3"),
        (Tied, STEPS, "c"),
        (Recurrent, STEPS, "r"),
    ],
    ids=["transposed", "grouped", "tied", "recurrent"],
)
def test_constants_that_no_bias_takes_up_are_not_lost_unseen(make: Any, x: Tensor, layer: str) -> None:
    model = make().eval()
    found = shrink.channels(model, x)
    group = next(
        one for one in found.groups if one.size in (4, 8) and layer in {n[: len(layer)] for n in one.group.consumers}
    )
    kept = range(group.size // 2, group.size)
    with pytest.raises(ShrinkError, match="a constant that goes cannot be taken up") as caught:
        shrink.absorbed(model, found.plan({group.name: kept}), x)
    assert caught.value.layer == layer
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.zero_()  # constants of zero are lost without a trace
    small, bordered = shrink.absorbed(model, found.plan({group.name: kept}), x)
    torch.testing.assert_close(small(x), model(x))
    assert not bordered


@pytest.mark.parametrize("height", [8, 5])
def test_an_image_without_a_batch_has_channels_too(height: int) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
            with torch.no_grad():
                self.a.weight[:4], self.a.bias[:4] = 0, 1

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x).relu())

    model, x = Plain().eval(), torch.randn(3, height, 6)
    plan = shrink.channels(model, x).plan({"a.weight:0": range(4, 8)})
    for given in (x, x[None]):
        small, _ = shrink.absorbed(model, plan, given)
        torch.testing.assert_close(small(given), model(given), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(shrink.cut(model, plan)(given), model(given), atol=1e-2), (
            "there was something to absorb"
        )
