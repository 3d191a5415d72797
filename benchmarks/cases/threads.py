"""Threads: products by a team from torch's OpenMP runtime, from torch's own loop, and from a pool of ours.

The smallest product is as good as empty: what is timed is how a team starts, meets and ends. Beside torch each product
follows a loop of torch's over 1 MB, whose threads may still spin when the team starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.console import Console

from cases.columns import headed
from cases.linear import Layer
from cases.records import machine_line
from cases.shapes import Shape
from twofour import kernels, measure, native
from twofour.kernels.problem import Problem
from twofour.measure import Record, geometric_mean

SOURCES = ("openmp", "torch", "own")
PRODUCTS = (("32x32", 1), ("384x384", 1), ("384x384", 32), ("1536x384", 128))
BESIDE = ("nothing", "torch")
CALLS = 32
"""Products between two changes of the source."""


def cells(threads: Sequence[int]) -> list[dict[str, object]]:
    """List the cells."""
    return [
        {"case": "threads", "dtype": "float32", "shape": shape, "tokens": tokens, "threads": count, "beside": beside}
        for count in threads
        for beside in BESIDE
        for shape, tokens in PRODUCTS
    ]


class Bench:
    """Measures cells, and leaves kernels with the threads they had."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell: seconds of `CALLS` products, and of as many of torch's loops where they stand beside."""
        before, call = native.threads_backend(), _call(cell)
        sources = [source for source in SOURCES if use(source)]
        try:
            with torch.inference_mode():
                return measure.compare(
                    {source: partial(_calls, source, call) for source in sources},
                    baseline=sources[0],
                    seconds=self.seconds,
                    threads=int(str(cell["threads"])),
                    noise=True,
                    meta=cell,
                )
        finally:
            use(before)


def use(source: str) -> bool:
    """Let kernels take their threads from a source; False where this process lacks it."""
    return native.extension().use_threads(source, torch._C.__file__)


def _call(cell: dict[str, object]) -> Callable[[], object]:
    rows, columns = map(int, str(cell["shape"]).split("x"))
    layer = Layer.of(Shape("product", rows, columns))
    x = torch.randn(int(str(cell["tokens"])), columns, generator=torch.Generator().manual_seed(1))
    kernel = kernels.select(layer.packed, len(x))
    product = partial(kernel.run, x, kernel.prepare(layer.packed), layer.bias, Problem(rows))
    if cell["beside"] == "nothing":
        return product
    values = torch.zeros(1 << 18)
    return lambda: (values.add_(1), product())


def _calls(source: str, call: Callable[[], object]) -> None:
    use(source)
    for _ in range(CALLS):
        call()


def show(records: Sequence[Record], console: Console) -> None:
    """Print microseconds of a call by each source, and how many times longer than by the first the others take."""
    keys, others = ("shape", "tokens", "threads", "beside"), [f"{name}/{SOURCES[0]}" for name in SOURCES[1:]]
    table = headed((*keys, *(f"{name} us" for name in SOURCES), *others, "noise"))
    for record in records:
        table.add_row(
            *(str(record.meta[name]) for name in keys),
            *(f"{record.undisturbed(name) / CALLS * 1e6:.1f}" if name in record.timings else "-" for name in SOURCES),
            *(_times([record], name) for name in SOURCES[1:]),
            f"{record.noise or 0:.1%}",
        )
    console.print(table)
    means = ", ".join(f"{pair} {_times(records, name)}" for pair, name in zip(others, SOURCES[1:], strict=True))
    console.print(f"first quartiles of the samples; geometric means: {means}", highlight=False)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)


def _times(records: Sequence[Record], name: str) -> str:
    both = [record for record in records if {name, SOURCES[0]} <= record.timings.keys()]
    ratios = [record.undisturbed(name) / record.undisturbed(SOURCES[0]) for record in both]
    return f"{geometric_mean(ratios):.2f}" if ratios else "-"
