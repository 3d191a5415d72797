"""Squeeze-and-excite and means over pixels through compile(..., graph=True): one call, and where they stay."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.small import quick
from twofour.compiler.pixel_means import PIXEL_MEANS
from twofour.compiler.squeeze import SQUEEZED


class Scaled(nn.Module):
    def __init__(
        self, gate: nn.Module, activation: nn.Module, linear: bool, mean: Callable[[Tensor], Tensor], channels: int = 24
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(8, channels, 3, padding=1)
        self.reduce = nn.Linear(channels, 8) if linear else nn.Conv2d(channels, 8, 1)
        self.expand = nn.Linear(8, channels) if linear else nn.Conv2d(8, channels, 1)
        self.gate, self.activation, self.linear, self.mean = gate, activation, linear, mean
        self.project = nn.Conv2d(channels, 8, 1)

    def scale(self, x: Tensor) -> Tensor:
        mean = self.mean(x).flatten(1) if self.linear else self.mean(x)
        found = self.gate(self.expand(self.activation(self.reduce(mean))))
        return found[..., None, None] if self.linear else found

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.project(x * self.scale(x))


def pixels(x: Tensor) -> Tensor:
    return x.mean((-1, -2), keepdim=True)


@pytest.mark.parametrize(
    ("linear", "gate", "activation"),
    [
        # Each pair of two of the three is met by `make test`.
        pytest.param(*case, marks=[pytest.mark.long] * (place in (1, 2, 4, 7)), id=" ".join(map(str, case)))
        for place, case in enumerate(
            itertools.product((False, True), (nn.Sigmoid(), nn.Hardsigmoid()), (nn.SiLU(), nn.ReLU(inplace=True)))
        )
    ],
)
def test_becomes_one_call(linear: bool, gate: nn.Module, activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = Scaled(gate, activation, linear, pixels if linear else nn.AdaptiveAvgPool2d(1)).eval()
    x = torch.randn(3, 8, 9, 7)
    fast = quick(model, x, graph=True)
    account = fast.plan.account
    assert account.rewrites[SQUEEZED] == 1
    left = {entry.operator for entry in account.after}
    assert "squeeze_excite" in left and not left & {"sigmoid", "hardsigmoid", "mul", "mean", "adaptive_avg_pool2d"}
    assert sum("kept again in squeeze-and-excite" in layer.reason for layer in fast.plan.layers) == 2
    for given in (x, x[:1], torch.randn(2, 8, 5, 6)):
        torch.testing.assert_close(fast(given), model(given), atol=1e-5, rtol=1e-5)
    small = quick(model, x, graph=True, memory="small")
    assert SQUEEZED not in small.plan.account.rewrites


class MeanSeen(Scaled):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        mean = self.mean(x)
        return x * self.gate(self.expand(self.activation(self.reduce(mean)))), mean


class OfAnother(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return y * self.scale(y + 1)


class Broadcast(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return y * self.scale(y)[:, :1]


class OneGate(Scaled):
    """One gate for all channels."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.expand = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return y * self.scale(y).expand_as(y)


@pytest.mark.parametrize("kind", [MeanSeen, OfAnother, Broadcast, OneGate])
def test_stays_where_others_read_it_or_it_is_another(kind: type[Scaled]) -> None:
    torch.manual_seed(0)
    model, x = kind(nn.Sigmoid(), nn.SiLU(), False, pixels).eval(), torch.randn(2, 8, 6, 6)
    fast = quick(model, x, graph=True)
    assert fast.plan.account.rewrites[SQUEEZED] == 0
    torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)


def test_another_axis_stays() -> None:
    torch.manual_seed(0)
    model = Scaled(nn.Sigmoid(), nn.SiLU(), False, lambda x: x.mean((2, 3), keepdim=True) + 0 * x.amax((2, 3), True))
    x = torch.randn(2, 8, 6, 6)
    fast = quick(model.eval(), x, graph=True)
    assert fast.plan.account.rewrites[SQUEEZED] == 0
    torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)


def test_a_view_of_its_answer_is_still_there() -> None:
    """The image comes channels first, and the answer is channels last: torch's view would refuse it."""

    class Viewed(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale(x)).view(len(x), -1)

    torch.manual_seed(0)
    model, x = Viewed(nn.Sigmoid(), nn.SiLU(), False, pixels, 8).eval(), torch.randn(2, 8, 6, 6)
    fast = quick(model, x, graph=True)
    assert fast.plan.account.rewrites[SQUEEZED] == 1
    torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)


class Pooled(nn.Module):
    """A network's end: convolution, mean, classifier."""

    def __init__(self, mean: Callable[[Tensor], Tensor], channels: int = 40) -> None:
        super().__init__()
        self.conv, self.classifier, self.mean = nn.Conv2d(8, channels, 3), nn.Linear(channels, 10), mean

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.mean(torch.relu(self.conv(x))).flatten(1))


@pytest.mark.parametrize(
    "mean", [nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1)), pixels, lambda x: x.mean((2, 3))]
)
def test_the_mean_behind_a_convolution_is_a_call_of_ours(mean: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Pooled(mean).eval(), torch.randn(2, 8, 7, 9)
    fast = quick(model, x, graph=True)
    account = fast.plan.account
    assert account.rewrites[PIXEL_MEANS] == 1
    left = {entry.operator for entry in account.after}
    assert "mean over pixels" in left and not left & {"mean", "adaptive_avg_pool2d"}
    for given in (x, x[:1], torch.randn(3, 8, 12, 5)):
        torch.testing.assert_close(fast(given), model(given), atol=1e-5, rtol=1e-5)


class OfTheInput(Pooled):
    """Images that lie channels first as they come."""

    def __init__(self) -> None:
        super().__init__(pixels, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).sum((2, 3)) + self.mean(x).flatten(1)


@pytest.mark.parametrize(
    "model",
    [
        OfTheInput(),
        Pooled(lambda x: x.mean(2)[:, :, 0]),
        Pooled(lambda x: nn.functional.adaptive_avg_pool2d(x, (1, 2))[..., 0]),
    ],
)
def test_other_means_stay_torchs(model: nn.Module) -> None:
    x = torch.randn(2, 8, 6, 6)
    fast = quick(model.eval(), x, graph=True)
    assert fast.plan.account.rewrites[PIXEL_MEANS] == 0
    torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
