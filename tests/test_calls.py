"""The example of a call: what its forms mean, the same to every function that takes one; and layers observed."""

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.turns import in_turn
from twofour import calls
from twofour.calls import Example
from twofour.compiler.ranges import observe
from twofour.errors import CompileError, PermutationError
from twofour.measure.distance import distance, largest_difference


class Sum(nn.Module):
    """Takes two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.first(x) + self.second(y)


class Stacked(Sum):
    """Takes one argument, a list."""

    def forward(self, parts: list[Tensor]) -> Tensor:
        return super().forward(*parts)


X, Y = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))


@in_turn(
    ("given", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, Y), (X, Y), {}),
        ([X, Y], (X, Y), {}),
        (([X, Y],), ([X, Y],), {}),
        ({"x": X, "y": Y}, (), {"x": X, "y": Y}),
        (Example((X,), {"y": Y}), (X,), {"y": Y}),
    ],
)
def test_the_forms_of_an_example(given, args, kwargs) -> None:
    found = Example.of(given)
    assert found.args == args and found.kwargs == kwargs
    assert all(
        mine is not one and torch.equal(mine, one) for mine, one in zip(found.copy().leaves, found.leaves, strict=True)
    )


def test_a_list_is_spread_everywhere() -> None:
    model = twofour.prune(Sum().eval(), "2:4", data=[[X, Y]], criterion="wanda", permute=True, example=[X, Y])
    for graph in (False, True):
        fast = twofour.compile(model, [X, Y], memory="small", graph=graph, tokens=(3,))
        assert fast.plan.error < 1e-3 and {layer.name for layer in fast.plan.layers} == {"first", "second"}


def test_an_argument_that_is_a_list_stands_in_a_tuple() -> None:
    fast = twofour.compile(twofour.prune(Stacked().eval(), "2:4"), ([X, Y],), memory="small", graph=False, tokens=(3,))
    assert fast.plan.error < 1e-3
    with pytest.raises(CompileError, match=r"\(\[a, b\],\) is one argument, a list"):
        twofour.compile(Stacked(), [X, Y])
    with pytest.raises(PermutationError, match="does not run on the example"):
        twofour.prune(Stacked(), "2:4", permute=True, example=[X, Y])


class Optional(nn.Module):
    """Takes a second argument if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.fc(x if scale is None else x * scale)


@in_turn("data", [X, [X], [(X, torch.ones(3))], [[X, None]], [{"x": X}], {"x": X}, [twofour.calibration.Batch(X, Y)]])
def test_ranges_read_data_as_prune_does(data) -> None:
    assert observe(Optional(), ["fc"], data) == observe(Optional(), ["fc"], [X])


def test_observed_layers_are_left_as_they_were() -> None:
    model, seen = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), []
    with (
        pytest.raises(ZeroDivisionError),
        calls.observing(
            model.named_children(),
            lambda name, layer, args, kwargs: seen.append((name, calls.first_input(args, kwargs).shape[-1])),
            lambda name, layer, args, kwargs, output: seen.append((name, output.shape[-1])),
        ),
    ):
        model[1](input=model[0](X))
        raise ZeroDivisionError
    assert seen == [("0", 64), ("0", 64), ("1", 64), ("1", 8)]
    model(X)
    assert len(seen) == 4


def test_complex_outputs_are_compared_as_numbers() -> None:
    want = torch.complex(torch.tensor([3.0]), torch.tensor([4.0]))
    assert distance([want * 1.01], [want]) == pytest.approx(0.01, rel=1e-3)
    assert largest_difference([want * 1.01], [want], least=1.0) == pytest.approx(0.01, rel=1e-3)
    assert largest_difference([torch.tensor([2])], [torch.tensor([1])]) == float("inf")


def test_fast_paths_come_back_whoever_leaves_first() -> None:
    """Threads and generators leave in another order than they came in."""
    first, second = calls.without_fast_paths(), calls.without_fast_paths()
    assert torch.backends.mha.get_fastpath_enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled(), "the second is inside still"
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()
