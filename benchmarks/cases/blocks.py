"""Fused blocks of element-wise and reduce operators on 4M numbers: ours, torch's operators one by one, and Inductor.

All three allocate their outputs inside the timing, from memory that malloc keeps: else the system maps and clears 16 MB
for each answer, which takes as long as many of the blocks. Ours and Inductor run the same captured graph; Inductor's
C++ is compiled outside the timing. A cell is measured in several fresh processes (`processes`).
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from cases import processes
from cases.records import machine_line
from twofour import measure
from twofour.capture import capture
from twofour.errors import MeasureError
from twofour.graph import Program
from twofour.graph.blocks import Always, fuse_blocks
from twofour.measure import Record, geometric_mean

TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2}
"""Largest errors of an answer's norm: torch rounds each operator's answer to eight bits."""
EAGER, INDUCTOR, OURS = "eager", "Inductor", "twofour"
FLOATS = 1 << 22
PROCESSES = 5


def _chain(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu((x * 1.5 + y) * x - 0.25)


def _long_chain(x: Tensor, y: Tensor) -> Tensor:
    z = x
    for _ in range(6):
        z = torch.clamp(z * y + 0.5, -3.0, 3.0)
    return z


def _gelu(x: Tensor, y: Tensor) -> Tensor:
    return functional.gelu(x + y) * y


def _gelu_tanh(x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x.pow(3)))) + y


def _gate(x: Tensor, y: Tensor) -> Tensor:
    return functional.silu(x) * y


def _softmax(x: Tensor, y: Tensor) -> Tensor:
    return ((x + y) * 0.125).softmax(-1)


def _log_softmax(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).log_softmax(-1)


def _rms_norm(x: Tensor, y: Tensor) -> Tensor:
    z = x + y
    return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6) * y[0]


def _layer_norm(x: Tensor, y: Tensor) -> Tensor:
    z = x + y
    apart = z - z.mean(-1, keepdim=True)
    return apart * torch.rsqrt(apart.pow(2).mean(-1, keepdim=True) + 1e-6) * y[0] + y[1]


def _row_sum(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def _row_max(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).amax(-1)


def _channel_scale(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x * torch.sigmoid(y[:, :1]) + 0.1)


WIDTHS = (64, 1024, 4096)
BLOCKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    function.__name__.lstrip("_"): function
    for function in (
        _chain, _long_chain, _gelu, _gelu_tanh, _gate, _channel_scale,
        _softmax, _log_softmax, _rms_norm, _layer_norm, _row_sum, _row_max,
    )
}  # fmt: skip
ELEMENT_WISE = ("chain", "long_chain", "gelu", "gelu_tanh", "gate")
"""Blocks whose time does not depend on the length of a row."""


class _Module(nn.Module):
    def __init__(self, block: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.block(x, y)


def cells(
    names: Sequence[str], threads: Sequence[int], floats: int = FLOATS, dtype: str = "float32"
) -> list[dict[str, object]]:
    """List the cells."""
    return [
        {
            "case": "blocks", "model": name, "shape": f"{floats // width}x{width}", "threads": count,
            "dtype": dtype, "width": width, "floats": floats,
        }
        for name in names
        for width in (WIDTHS[1:2] if name in ELEMENT_WISE else WIDTHS)
        for count in threads
    ]  # fmt: skip


def keep_freed_memory() -> None:
    """Let malloc serve large tensors from memory that others have left, for the rest of the process; glibc's only."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        threshold_of_maps, trimmed_from = -3, -1
        change(threshold_of_maps, 32 << 20)
        change(trimmed_from, 1 << 30)


class Bench:
    """Measures cells, each in so many fresh processes; 1: in this one."""

    def __init__(self, seconds: float, without: Sequence[str] = (), processes: int = 1) -> None:
        self.seconds, self.without, self.processes = seconds, set(without), processes

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        if self.processes > 1:
            settings = {"cell": cell, "seconds": self.seconds, "without": sorted(self.without)}
            return processes.measured("blocks", settings, self.processes)
        keep_freed_memory()
        width, threads = int(str(cell["width"])), int(str(cell["threads"]))
        generator = torch.Generator().manual_seed(0)
        rows = int(str(cell["floats"])) // width
        dtype = getattr(torch, str(cell["dtype"]))
        x, y = (torch.randn(rows, width, generator=generator).to(dtype) for _ in range(2))
        module = _Module(BLOCKS[str(cell["model"])])
        with torch.inference_mode():
            candidates = _candidates(module, x, y, self.without)
            _verify(candidates, module(x.double(), y.double()), str(cell["model"]), TOLERANCES[str(cell["dtype"])])
            return measure.compare(
                candidates,
                baseline=(EAGER,),
                seconds=self.seconds,
                threads=threads,
                clock="thread" if threads == 1 else "wall",
                pin=threads == 1,
                noise=True,
                meta=cell,
            )


def _candidates(module: nn.Module, x: Tensor, y: Tensor, without: set[str]) -> dict[str, Callable[[], Tensor]]:
    graph = capture(module, {"x": x, "y": y}, {})
    before = Program(graph.module)
    fuse_blocks(graph.module, Always())
    after = Program(graph.module)
    found: dict[str, Callable[[], Tensor]] = {EAGER: lambda: before(x, y)[0], OURS: lambda: after(x, y)[0]}
    if INDUCTOR not in without:
        torch._dynamo.reset()  # else it gives up after a few modules of one class
        compiled = torch.compile(module, dynamic=False)
        found[INDUCTOR] = lambda: compiled(x, y)
    return found


def _verify(candidates: dict[str, Callable[[], Tensor]], exact: Tensor, name: str, tolerance: float) -> None:
    for who, call in candidates.items():
        error = float((call().double() - exact).norm() / exact.norm())
        if not error <= tolerance:
            raise MeasureError(f"{who} is wrong and is not timed", got=f"error {error:.2e} of {name}")


def show(records: Sequence[Record], console: Console) -> None:
    """Print each block with its times, and how many times faster ours is."""
    table = Table(box=None, pad_edge=False)
    for name in (
        "block",
        "shape",
        "dtype",
        "threads",
        "eager ms",
        "Inductor ms",
        "twofour ms",
        "to eager",
        "to Inductor",
        "by process",
    ):
        table.add_column(name, justify="left" if name == "block" else "right")
    ratios: dict[str, list[float]] = {EAGER: [], INDUCTOR: []}
    for record in records:
        times = {name: record.undisturbed(name) for name in (EAGER, INDUCTOR, OURS) if name in record.timings}
        against = {name: times[name] / times[OURS] for name in ratios if name in times}
        for name, ratio in against.items():
            ratios[name].append(ratio)
        table.add_row(
            *(str(record.meta[name]) for name in ("model", "shape", "dtype", "threads")),
            *(f"{1e3 * times[name]:.2f}" if name in times else "-" for name in (EAGER, INDUCTOR, OURS)),
            *(f"{against[name]:.2f}x" if name in against else "-" for name in ratios),
            " ".join(f"{ratio:.2f}" for ratio in processes.ratios(record, OURS, INDUCTOR))
            if INDUCTOR in times
            else "-",
        )
    console.print(table)
    means = ", ".join(f"{geometric_mean(found):.2f}x {name}'s speed" for name, found in ratios.items() if found)
    console.print(f"geometric means: {means}", highlight=False)
    console.print(machine_line(records[0]), highlight=False)


def main(settings: str) -> None:
    """Print the record of one cell, measured in this process; JSON to JSON."""
    given = json.loads(settings)
    torch.set_num_threads(1)  # as `records.run` does
    record = Bench(given["seconds"], given["without"])(given["cell"])
    print(json.dumps(record.to_dict()))


if __name__ == "__main__":
    main(sys.argv[1])
