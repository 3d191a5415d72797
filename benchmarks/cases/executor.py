"""A graph's two programs: chains of tiny calls by straight-line Python and by the native executor.

The calls are as good as empty: what is timed is what a program adds to each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from torch import Tensor, fx, nn

from cases.columns import headed
from cases.linear import Layer
from cases.records import machine_line
from cases.shapes import Shape
from twofour import kernels, measure
from twofour.errors import MeasureError
from twofour.graph import Executor, Program
from twofour.kernels.attention import attention_of_columns
from twofour.kernels.norm import norm
from twofour.kernels.problem import Problem
from twofour.measure import Record

CALLS = ("norm", "product", "attention", "views", "relu of torch")
LENGTH = 100
"""Calls in a chain."""
WIDTH = 16


def cells() -> list[dict[str, object]]:
    """List the cells."""
    sizes = {"dtype": "float32", "tokens": 1, "threads": 1}
    return [{"case": "executor", "shape": call, "length": LENGTH, **sizes} for call in CALLS]


class Product(nn.Module):
    """A packed product, as a graph holds one."""

    def __init__(self) -> None:
        super().__init__()
        layer = Layer.of(Shape("product", WIDTH, WIDTH))
        self.kernel = kernels.select(layer.packed, 1)
        self.prepared, self.kept = self.kernel.prepare(layer.packed), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return self.kernel.run(x, self.prepared, self.kept, Problem(WIDTH))


def chain(call: str) -> Program:
    """Return a program of `LENGTH` calls, each on what the one before answered."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(LENGTH):
        value = _one(graph, call, value)
    graph.output((value,))
    return Program(fx.GraphModule(nn.ModuleDict({"product": Product()}), graph))


def _one(graph: fx.Graph, call: str, value: fx.Node) -> fx.Node:
    if call == "norm":
        return graph.call_function(norm, (value, None, None, 1e-5))
    if call == "product":
        return graph.call_module("product", (value,))
    if call == "attention":
        wide = graph.call_method("unsqueeze", (value, 0))
        found = graph.call_function(attention_of_columns, (wide, wide, wide, (0, 0, 0), (WIDTH,) * 3, WIDTH))
        return graph.call_method("squeeze", (found, 0))
    if call == "views":
        turned = graph.call_method("transpose", (value, 0, 1))
        return graph.call_function(norm, (graph.call_method("transpose", (turned, 0, 1)), None, None, 1e-5))
    return graph.call_function(torch.relu, (value,))


class Bench:
    """Measures cells."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell: seconds of a whole chain."""
        x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            executor = Executor(chain(str(cell["shape"])))
            if reason := executor.prepare([x]).reason:
                raise MeasureError("the chain cannot be replayed", got=reason)
            programs: dict[str, Callable[[], object]] = {
                "python": lambda: executor.python(x),
                "native": lambda: executor(x),
            }
            return measure.compare(
                programs, baseline="python", seconds=self.seconds, threads=1, noise=True, meta=dict(cell)
            )


def show(records: Sequence[Record], console: Console) -> None:
    """Print microseconds of a call by each program."""
    table = headed(("call", "python us", "native us", "times faster"))
    for record in records:
        python, native = (1e6 * record.undisturbed(name) / LENGTH for name in ("python", "native"))
        table.add_row(str(record.meta["shape"]), f"{python:.2f}", f"{native:.2f}", f"{python / native:.1f}")
    console.print(table)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)
