"""A graph as straight-line Python."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from twofour.capture import capture
from twofour.graph import Program
from twofour.graph import program as program_module


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        y = self.layer(x)
        return torch.cat([y[:, 1:3], y[:, :1]], dim=-1).softmax(-1), y, x.shape[0]


def program(**options: object) -> tuple[Model, Program]:
    model = Model().eval()
    return model, Program(capture(model, {"x": torch.randn(3, 4)}).module, **options)  # type: ignore[arg-type]


def test_it_computes_what_the_model_does_for_other_sizes() -> None:
    model, run = program()
    x = torch.randn(7, 4)
    for got, want in zip(run(x), model(x), strict=True):
        torch.testing.assert_close(got, want)


def test_values_are_dropped_after_their_last_use() -> None:
    _, run = program()
    assert "    del cat" in run.text
    assert not any(line.startswith("    del") and "linear" in line for line in run.text.splitlines()), "it is returned"


def test_layers_kept_whole_are_called() -> None:
    model = Model().eval()
    graph = capture(model, {"x": torch.randn(3, 4)}, {"layer": (6,)})
    x = torch.randn(2, 4)
    torch.testing.assert_close(Program(graph.module, {"layer": model.layer})(x)[1], model(x)[1])


def test_copies_and_pickles() -> None:
    model, run = program()
    x = torch.randn(2, 4)
    for other in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        torch.testing.assert_close(other(x)[0], model(x)[0])


def test_a_timed_program_says_what_each_call_took() -> None:
    _, run = program(timed=True)
    times = run.seconds([torch.randn(3, 4)], repeats=3)
    assert "linear" in [name for name, _ in times]
    assert all(seconds >= 0 for _, seconds in times)


def test_two_runs_of_a_long_program_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module, "LONG_SECONDS", 0.0)
    _, run = program(timed=True)
    x, seen = torch.randn(3, 4), []
    monkeypatch.setattr(program_module.statistics, "median", lambda column: seen.append(len(column)) or min(column))
    run.seconds([x], repeats=7)
    assert set(seen) == {2}


def test_names_of_the_model_and_of_the_program_do_not_meet() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.run = nn.Buffer(torch.randn(3))

        def forward(self, times: Tensor, clock: Tensor, constant_0: Tensor) -> Tensor:
            return torch.relu(times + clock) * constant_0 + self.run

    model, inputs = Named().eval(), [torch.randn(2, 3) for _ in range(3)]
    graph = capture(model, dict(zip(("times", "clock", "constant_0"), inputs, strict=True)))
    torch.testing.assert_close(Program(graph.module)(*inputs)[0], model(*inputs))
    assert len(Program(graph.module, timed=True).seconds(inputs)) == 4
