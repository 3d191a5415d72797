"""Training: a step of a transformer block stack or of a net of convolutions, dense and with 2:4 products, interleaved.

Dense steps: torch's own (eager), torch.compile, and the fastest dense way of every product as `both_ways` measures it
(its control: oneDNN where torch's default is slower); the best of the three is the base. Sparse steps: SDGP (rescaled;
its data gradient sparse where that is measured to be faster, its other products by the fastest dense way), weights
that are 2:4 both ways, the same with the kept values alone as parameters (of fixed masks), the first with the unbiased
2:4 weight gradient. Every step is a whole one: forward, loss, backward, fused AdamW, zero_grad, packing included;
bfloat16 is autocast with float32 parameters.

Of the net of convolutions (`models/resnet9.py`) the dense steps are torch's in both memory formats and torch.compile
channels-last, the sparse ones SDGP in both formats and compiled, and weights that are 2:4 both ways, compiled too. Its
optimiser is fused SGD with momentum.
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

from models.resnet9 import ResNet9
from twofour import measure
from twofour.measure import Record
from twofour.training import both_ways, sdgp
from twofour.training.both_ways import PARTS

EAGER, COMPILED, CONTROL = "eager", "torch.compile", "best dense products"
SDGP, BOTH, KEPT, ALL = "SDGP", "2:4 both ways", "2:4 both ways, packed", "2:4 all three"
DENSE = (EAGER, COMPILED, CONTROL)
SPARSE = (SDGP, BOTH, KEPT, ALL)
LAST, SDGP_PLAIN = "eager, channels-last", "SDGP, contiguous"
SDGP_COMPILED, SDGP_DENSE = "SDGP, torch.compile", "SDGP, dense products"
BOTH_COMPILED = "2:4 both ways, torch.compile"
IMAGES_DENSE, IMAGES_SPARSE = (
    (EAGER, LAST, COMPILED),
    (SDGP, SDGP_COMPILED, SDGP_PLAIN, SDGP_DENSE, BOTH, BOTH_COMPILED),
)
WIDTH, HIDDEN, HEADS, SEQUENCE, SEQUENCES, DEPTH = 768, 3072, 12, 128, 16, 2
IMAGES_WIDTH, IMAGES = 128, 32
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

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer
    ) -> None:
        self.model, self.dtype, self.x, self.y, self.optimizer = model, dtype, x, y, optimizer
        self.run: Callable[[Tensor], Tensor] = model
        self.handle: Any = None  # of what is attached: the hooks hold it weakly

    def autocast(self) -> AbstractContextManager[Any]:
        """What the step runs its forward pass in."""
        return torch.autocast("cpu", self.dtype) if self.dtype is not torch.float32 else nullcontext()

    @classmethod
    def of_blocks(cls, model: nn.Module, dtype: torch.dtype, sequences: int) -> Step:
        """Return a step of blocks, with fused AdamW."""
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(sequences, SEQUENCE, WIDTH, generator=generator) for _ in range(2))
        return cls(model, dtype, x, y, torch.optim.AdamW(model.parameters(), 1e-4, fused=True))

    @classmethod
    def of_images(cls, model: nn.Module, dtype: torch.dtype, images: int, form: torch.memory_format) -> Step:
        """Return a step of a net of convolutions in a memory format, with fused SGD."""
        model = cast(Any, model).to(memory_format=form)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(images, 3, 32, 32, generator=generator).contiguous(memory_format=form)
        y = torch.randint(10, (images,), generator=generator)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=5e-4, fused=True)
        return cls(model, dtype, x, y, optimizer)

    def forward(self) -> Tensor:
        """Return the loss."""
        with self.autocast():
            found = self.run(self.x).float()
            return (
                functional.mse_loss(found, self.y)
                if self.y.is_floating_point()
                else functional.cross_entropy(found, self.y)
            )

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


def cells(
    dtypes: Sequence[str], schedule: str, sequences: int = SEQUENCES, threads: Sequence[int] = (1,)
) -> list[dict[str, object]]:
    """List the cells: one a type and count of threads."""
    geometry = f"{DEPTH} blocks of {WIDTH}, MLP {HIDDEN}, {sequences} x {SEQUENCE} tokens, {schedule}"
    fields = {"geometry": geometry, "schedule": schedule, "sequences": sequences}
    return [{"case": "training", "dtype": dtype, **fields, "threads": count} for dtype in dtypes for count in threads]


def image_cells(dtypes: Sequence[str], images: int, threads: Sequence[int] = (1,)) -> list[dict[str, object]]:
    """List the same of the net of convolutions."""
    geometry = f"ResNet-9 of width {IMAGES_WIDTH}, {images} images of 32 x 32"
    fields = {"case": "training", "net": "resnet9", "geometry": geometry, "images": images}
    return [{**fields, "dtype": dtype, "threads": count} for dtype in dtypes for count in threads]


class Bench:
    """Measures cells."""

    def __init__(self, seconds: float, without: Sequence[str]) -> None:
        self.seconds, self.without = seconds, without

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        threads = cast(int, cell["threads"])
        torch.set_num_threads(threads)
        dtype, box = TYPES[str(cell["dtype"])], min(0.3, self.seconds)
        if "images" in cell:
            made = image_steps(dtype, cast(int, cell["images"]), self.without, box)
        else:
            made = steps(dtype, str(cell["schedule"]), cast(int, cell["sequences"]), self.without, box)
        for step in made.values():
            step()
        # What runs functions between the layers, and SDGP's products, was chosen in the step before.
        plans = {name: str(step.handle.plan) for name, step in made.items() if step.handle is not None}
        profiles = {name: _profile(step) for name, step in made.items() if name in (CONTROL, *SPARSE, *IMAGES_SPARSE)}
        return measure.compare(
            {name: cast(Callable[[], object], step) for name, step in made.items()},
            baseline=[name for name in (*DENSE, LAST) if name in made],
            seconds=self.seconds,
            repeats=30,
            threads=threads,
            noise=True,
            meta={**cell, "parts": profiles, "plans": plans, "memory": _memory(made)},
        )


def steps(
    dtype: torch.dtype, schedule: str, sequences: int, without: Sequence[str], seconds: float = 0.3
) -> dict[str, Step]:
    """Build every step on a copy of one model."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(DEPTH)])
    names = [name for name in (*DENSE, *SPARSE) if name not in without and (name != KEPT or schedule == "fixed")]
    made = {name: Step.of_blocks(copy.deepcopy(model), dtype, sequences) for name in names}
    attached: dict[str, dict[str, Any]] = {
        CONTROL: {"kernels": "dense"},
        BOTH: {"schedule": schedule},
        KEPT: {"state": "packed"},
        ALL: {"schedule": schedule, "gradient": "2:4"},
    }
    for name, options in attached.items():
        if name in made:
            with made[name].autocast():
                made[name].handle = both_ways.attach(made[name].model, made[name].x, seconds=seconds, **options)
    if SDGP in made:
        made[SDGP].handle = sdgp.attach(made[SDGP].model, "2:4", seconds=seconds)
    if COMPILED in made:
        made[COMPILED].run = cast(Callable[[Tensor], Tensor], torch.compile(made[COMPILED].model))
    return made


def image_steps(dtype: torch.dtype, images: int, without: Sequence[str], seconds: float = 0.3) -> dict[str, Step]:
    """Build every step of the net of convolutions on a copy of one model."""
    torch.manual_seed(0)
    model = ResNet9(IMAGES_WIDTH)
    made: dict[str, Step] = {}
    for name in (*IMAGES_DENSE, *IMAGES_SPARSE):
        if name not in without:
            form = torch.contiguous_format if name in (EAGER, SDGP_PLAIN) else torch.channels_last
            made[name] = Step.of_images(copy.deepcopy(model), dtype, images, form)
    for name in IMAGES_SPARSE:
        if name in made and name not in (BOTH, BOTH_COMPILED):
            product = "dense" if name == SDGP_DENSE else "auto"
            made[name].handle = sdgp.attach(made[name].model, "2:4", product=product, seconds=seconds)
    for name in (BOTH, BOTH_COMPILED):
        if name in made:
            with made[name].autocast():
                made[name].handle = both_ways.attach(made[name].model, made[name].x, seconds=seconds)
    for name in (COMPILED, SDGP_COMPILED, BOTH_COMPILED):
        if name in made:
            made[name].run = cast(Callable[[Tensor], Tensor], torch.compile(made[name].model))
    return made


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
        title = f"training step, {record.meta['dtype']}, {record.meta['geometry']}, threads: {record.meta['threads']}"
        table = Table(title=title, title_justify="left")
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
