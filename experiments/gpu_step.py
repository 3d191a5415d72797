"""Where a dense training step of a GPU goes: forward, input gradient, weight gradient, norms, the rest, optimiser.

`python experiments/gpu_step.py OUT` writes OUT/step.json in under 40 s: nets of `step_nets` with random weights and
inputs, bfloat16 by autocast, channels last, fused optimisers, cuDNN's search of algorithms on.

Steps are timed whole, by events. In further ones each operator is timed where it stands, behind a kernel that waits, so
that the host's time to launch it does not count; a convolution's two gradients are asked for apart. Without a GPU it
says so and ends with exit code 0; `--tiny` runs a step of each net on the CPU, at sizes that mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from step_nets import NETS, StepNet
from twofour import measure
from twofour.native import gpu

STEPS, WARM, TRACED = 12, 4, 3
"""Steps timed whole, steps before, steps timed by operator."""

LAST = 30
"""Seconds after which no further net is begun."""

WAIT = 400_000
"""Cycles of the kernel ahead of each operator: longer than the host takes to launch one."""

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear)
SAME = (aten.t, aten.transpose, aten.view, aten._unsafe_view, aten.detach, aten._to_copy, aten.permute, aten.alias)


@dataclass
class Clock:
    """Milliseconds of what runs between two marks, on the GPU by events, else by the host's clock."""

    device: torch.device
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def timed(self, run: Callable[[], Any], wait: bool = False) -> Any:
        """Run between two marks; with `wait` behind a kernel that waits."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            result = run()
            self.pairs.append((begin, time.perf_counter()))
            return result
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if wait:
            torch.cuda._sleep(WAIT)
        begin.record()
        result = run()
        end.record()
        self.pairs.append((begin, end))
        return result

    def milliseconds(self) -> list[float]:
        """Return the times of all runs, and forget them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            found = [begin.elapsed_time(end) for begin, end in self.pairs]
        else:
            found = [(end - begin) * 1e3 for begin, end in self.pairs]
        self.pairs.clear()
        return found


class Operators(TorchDispatchMode):
    """Times each operator of a step."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        super().__init__()
        self.clock, self.phase = clock, "forward"
        self.weights = {id(parameter): name for name, parameter in model.named_parameters()}
        self.kept: list[Tensor] = []
        self.rows: list[tuple[str, str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, kwargs or {}
        if packet is aten.convolution_backward:
            return self._both(func, args)
        result = self._timed(self._part(packet, args), packet, args, lambda: func(*args, **kwargs))
        known = next((self.weights[id(a)] for a in args if isinstance(a, Tensor) and id(a) in self.weights), None)
        if packet in SAME and known is not None and isinstance(result, Tensor):
            self.weights[id(result)] = known
            self.kept.append(result)  # the id of a dead tensor may be given again
        return result

    def _timed(self, part: str, packet: Any, args: Any, run: Callable[[], Any]) -> Any:
        shapes = " ".join("x".join(map(str, a.shape)) for a in args if isinstance(a, Tensor))
        self.rows.append((part, str(packet).removeprefix("aten."), shapes))
        return self.clock.timed(run, wait=True)

    def _both(self, func: Any, args: Any) -> Any:
        """Ask for a convolution's gradients one after the other."""
        *head, wanted = args
        results: list[Any] = [None] * 3
        for part, mask in (("input gradient", (0,)), ("weight gradient", (1, 2))):
            asked = [wanted[i] and i in mask for i in range(3)]
            if any(asked):
                found = self._timed(part, aten.convolution_backward, args, lambda m=asked: func(*head, m))
                results = [new if ask else old for new, old, ask in zip(found, results, asked, strict=True)]
        return tuple(results)

    def _part(self, packet: Any, args: Any) -> str:
        name = str(packet)
        if self.phase == "optimiser":
            return "optimiser"
        if "scaled_dot_product" in name or packet in (aten.bmm, aten.baddbmm):
            return f"attention, {self.phase}"
        if packet in PRODUCTS or packet is aten.convolution:
            if self.phase == "forward":
                return "forward"
            weighed = any(isinstance(a, Tensor) and id(a) in self.weights for a in args)
            return "input gradient" if weighed else "weight gradient"
        return "norms" if "norm" in name else "elementwise"


def step_of(
    net: StepNet, device: torch.device, tiny: bool
) -> tuple[nn.Module, Iterator[tuple[str, Callable[[], Any]]]]:
    """Return a net and its endless steps, in phases."""
    torch.manual_seed(0)
    model, given, classes = net.model(tiny), net.example(tiny), net.classes
    model = model.to(device).train()
    if not isinstance(given, dict):
        model, given = model.to(memory_format=torch.channels_last), given.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    given = {k: v.to(device) for k, v in given.items()} if isinstance(given, dict) else given.to(device)
    rows = next(iter(given.values())).shape[0] if isinstance(given, dict) else given.shape[0]
    target = torch.randint(0, classes, (rows,), device=device)
    optimizer = net.optimizer(model.parameters(), fused=device.type == "cuda")

    def forward() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            output = model(**given) if isinstance(given, dict) else model(given)
            return F.cross_entropy(net.scores(output).float(), target)

    def phases() -> Iterator[tuple[str, Callable[[], Any]]]:
        found: dict[str, Tensor] = {}
        while True:
            yield "forward", lambda: found.update(loss=forward())
            yield "backward", lambda: found["loss"].backward()
            yield "optimiser", optimizer.step
            optimizer.zero_grad(set_to_none=True)

    return model, phases()


def measured(net: StepNet, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Measure one net."""
    model, phases = step_of(net, device, tiny)
    clock = Clock(device)
    counts = (1, 1, 1) if tiny else (WARM, STEPS, TRACED)
    for _ in range(3 * counts[0]):
        next(phases)[1]()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3 * counts[1]):
        clock.timed(next(phases)[1])
    times = clock.milliseconds()
    wall = (time.perf_counter() - begin) / counts[1] * 1e3
    whole = {name: statistics.median(times[i::3]) for i, name in enumerate(("forward", "backward", "optimiser"))}
    totals: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    counted: dict[tuple[str, str, str], int] = defaultdict(int)
    for _ in range(counts[2]):
        with Operators(model, clock) as operators:
            for _ in range(3):
                operators.phase, run = next(phases)
                run()
        sums: dict[tuple[str, str, str], float] = defaultdict(float)
        counted.clear()
        for row, spent in zip(operators.rows, clock.milliseconds(), strict=True):
            sums[row] += spent
            counted[row] += 1
        for row, spent in sums.items():
            totals[row].append(spent)
    rows = [
        {
            "part": part,
            "operator": name,
            "shapes": shapes,
            "times": counted[part, name, shapes],
            "ms": statistics.median(spent),
        }
        for (part, name, shapes), spent in totals.items()
    ]
    parts: dict[str, float] = defaultdict(float)
    for row in rows:
        parts[row["part"]] += row["ms"]
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "net": net.name,
        "batch": net.batch,
        "step_ms": sum(whole.values()),
        "wall_ms": wall,
        "phases_ms": whole,
        "operators_ms": sum(parts.values()),
        "parts_ms": dict(parts),
        "memory_bytes": memory,
        "rows": sorted(rows, key=lambda row: -row["ms"]),
    }


def main(
    out: Annotated[Path, typer.Argument(help="Folder of step.json.")],
    only: Annotated[str, typer.Option(help="Nets, comma separated.")] = ",".join(NETS),
    tiny: Annotated[bool, typer.Option(help="Tiny sizes on the CPU: whether it runs.")] = False,
) -> None:
    """Measure the nets in their order, as many as begin in time; what was measured is written after each."""
    if (reason := gpu.unavailable()) and not tiny:
        typer.echo(f"the step is not run: this machine {reason}")
        return
    device = torch.device("cpu") if tiny else gpu.device()
    torch.backends.cudnn.benchmark = True
    out.mkdir(parents=True, exist_ok=True)
    begin, nets = time.perf_counter(), []
    for name in only.split(","):
        if time.perf_counter() - begin > LAST:
            typer.echo(f"{name}: not begun, {LAST} s are over")
            continue
        try:
            nets.append(measured(NETS[name], device, tiny))
        except torch.OutOfMemoryError as error:
            typer.echo(f"{name}: {error}")
            continue
        found = {"torch": torch.__version__, "gpu": None if tiny else measure.gpu_facts(), "machine": measure.machine()}
        measure.write_json(out / "step.json", {**found, "dtype": "bfloat16", "nets": nets})
        parts = ", ".join(f"{part} {ms:.2f}" for part, ms in nets[-1]["parts_ms"].items())
        typer.echo(f"{name}: {nets[-1]['step_ms']:.2f} ms a step, {nets[-1]['operators_ms']:.2f} by operator: {parts}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    typer.run(main)
