"""Training: a step of a transformer block stack, dense and with 2:4 products, interleaved in one run.

Dense steps: torch's own (eager), torch.compile, and the fastest dense way of every product as `both_ways` measures it
(its control: oneDNN where torch's default is slower); the best of the three is the base. Sparse steps: SDGP (rescaled;
its data gradient sparse where that is measured to be faster, its other products by the fastest dense way), weights
that are 2:4 both ways, the same with the kept values alone as parameters (of fixed masks), the first with the unbiased
2:4 weight gradient. Every step is a whole one: forward, loss, backward, fused AdamW, zero_grad, packing included;
bfloat16 is autocast with float32 parameters.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from statistics import median
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from twofour import measure
from twofour.measure import Record
from twofour.training import both_ways, sdgp
from twofour.training.both_ways import PARTS

EAGER, COMPILED, CONTROL = "eager", "torch.compile", "best dense products"
SDGP, BOTH, KEPT, ALL = "SDGP", "2:4 both ways", "2:4 both ways, packed", "2:4 all three"
DENSE = (EAGER, COMPILED, CONTROL)
SPARSE = (SDGP, BOTH, KEPT, ALL)
WIDTH, HIDDEN, HEADS, SEQUENCE, SEQUENCES, DEPTH = 768, 3072, 12, 128, 16, 2
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), nn.GELU("tanh"), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(attended)
        return x + self.down(self.act(self.up(self.norm2(x))))


class Step:
    """One training step of a model of its own; calling it runs one."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, sequences: int) -> None:
        self.model, self.dtype = model, dtype
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(sequences, SEQUENCE, WIDTH, generator=generator)
        self.y = torch.randn(sequences, SEQUENCE, WIDTH, generator=generator)
        self.run: Callable[[Tensor], Tensor] = model
        self.handle: Any = None  # of what is attached: the hooks hold it weakly

    def autocast(self) -> AbstractContextManager[Any]:
        """What the step runs its forward pass in."""
        return torch.autocast("cpu", self.dtype) if self.dtype is not torch.float32 else nullcontext()

    def forward(self) -> Tensor:
        """Return the loss."""
        with self.autocast():
            return functional.mse_loss(self.run(self.x).float(), self.y)

    def __call__(self) -> None:
        """Run the step."""
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part of one step."""
        with both_ways.timed() as seconds:
            begin = time.perf_counter()
            loss = self.forward()
            middle, inside = time.perf_counter(), sum(seconds.values())
            loss.backward()
            end = time.perf_counter()
            own = sum(seconds.values())
            self.optimizer.step()
            self.optimizer.zero_grad()
            done = time.perf_counter()
        return {
            **{name: seconds[name] for name in PARTS},
            "other forward": middle - begin - inside,
            "other backward": end - middle - (own - inside),
            "optimizer": done - end,
        }


def cells(dtypes: Sequence[str], schedule: str, sequences: int = SEQUENCES) -> list[dict[str, object]]:
    """List the cells: one a type, one thread."""
    geometry = f"{DEPTH} blocks of {WIDTH}, MLP {HIDDEN}, {sequences} x {SEQUENCE} tokens, {schedule}"
    fields = {"geometry": geometry, "schedule": schedule, "sequences": sequences, "threads": 1}
    return [{"case": "training", "dtype": dtype, **fields} for dtype in dtypes]


class Bench:
    """Measures cells."""

    def __init__(self, seconds: float, without: Sequence[str]) -> None:
        self.seconds, self.without = seconds, without

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        torch.set_num_threads(1)
        asked = TYPES[str(cell["dtype"])], str(cell["schedule"]), cast(int, cell["sequences"])
        made, plans = steps(*asked, self.without, min(0.3, self.seconds))
        for step in made.values():
            step()
        if SDGP in made:
            plans[SDGP] = str(made[SDGP].handle.plan)  # it chose in the step before
        profiles = {name: _profile(step) for name, step in made.items() if name in (CONTROL, *SPARSE)}
        return measure.compare(
            {name: cast(Callable[[], object], step) for name, step in made.items()},
            baseline=[name for name in DENSE if name in made],
            seconds=self.seconds,
            repeats=30,
            threads=1,
            noise=True,
            meta={**cell, "parts": profiles, "plans": plans, "memory": _memory(made)},
        )


def steps(
    dtype: torch.dtype, schedule: str, sequences: int, without: Sequence[str], seconds: float = 0.3
) -> tuple[dict[str, Step], dict[str, str]]:
    """Build every step on a copy of one model, and the plans of those that have one."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(DEPTH)])
    names = [name for name in (*DENSE, *SPARSE) if name not in without and (name != KEPT or schedule == "fixed")]
    made = {name: Step(copy.deepcopy(model), dtype, sequences) for name in names}
    plans: dict[str, str] = {}
    attached: dict[str, dict[str, Any]] = {
        CONTROL: {"kernels": "dense"},
        BOTH: {"schedule": schedule},
        KEPT: {"state": "packed"},
        ALL: {"schedule": schedule, "gradient": "2:4"},
    }
    for name, options in attached.items():
        if name in made:
            with made[name].autocast():
                handle = both_ways.attach(made[name].model, made[name].x, seconds=seconds, **options)
            made[name].handle = handle
            plans[name] = str(handle.plan)
    if SDGP in made:
        made[SDGP].handle = sdgp.attach(made[SDGP].model, "2:4", seconds=seconds)
    if COMPILED in made:
        made[COMPILED].run = cast(Callable[[Tensor], Tensor], torch.compile(made[COMPILED].model))
    return made, plans


def _profile(step: Step) -> dict[str, float]:
    rounds = [step.parts() for _ in range(3)]
    return {name: median(parts[name] for parts in rounds) for name in rounds[0]}


def _memory(made: Mapping[str, Step]) -> dict[str, dict[str, float]]:
    """Return the bytes of weights, optimiser state and layouts, and their ratio to a dense training."""
    found = {name: made[name].handle.memory for name in (BOTH, KEPT) if name in made}
    return {name: {**asdict(memory), "ratio": memory.ratio} for name, memory in found.items()}


def show(found: Sequence[Record], console: Console) -> None:
    """Print the steps of every type, and where their time goes."""
    for record in found:
        best = min(record.median(name) for name in record.baseline)
        table = Table(title=f"training step, {record.meta['dtype']}, {record.meta['geometry']}", title_justify="left")
        profiles = cast(Mapping[str, Mapping[str, float]], record.meta["parts"])
        names = list(next(iter(profiles.values()), {}))
        for column in ("step", "ms", "best dense / it", *names):
            table.add_column(column, justify="left" if column == "step" else "right")
        for name in record.timings:
            parts = [f"{profiles[name][part] * 1e3:.1f}" if name in profiles else "" for part in names]
            table.add_row(name, f"{record.median(name) * 1e3:.1f}", f"{best / record.median(name):.3f}", *parts)
        console.print(table)
        memories = cast(Mapping[str, Mapping[str, float]], record.meta.get("memory", {}))
        for name, memory in memories.items():
            layouts = memory["layouts"] / 1e6
            console.print(f"{name}: weights and state {memory['ratio']:.2f} of dense, layouts {layouts:.1f} MB")
