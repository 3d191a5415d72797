"""A whole repetition: a converged net trained again on its data, dense and sparse, seconds of wall time and its metric.

The arms are trained in one process on the same batches, a slice of a few steps each in turn, so that all of them see
the same machine. A dense arm (the control) and sparse ones: weights that are 2:4 both ways, of the encoder with the
kept values alone as parameters, 2:4 weights with SDGP, and, of the net of convolutions, 2:4 masks alone. Sparse arms
are pruned as `twofour.prune` does it with the task's calibration data, or by the criterion that is named. Of the ways
in which an arm can run, eager, compiled, with the fastest dense way of every product, the fastest is trained: forward
and backward pass of the first batches, in turns, say which. A step is a whole one: batch made, forward, loss, backward,
fused optimiser, rate of learning; what comes before the first (masks, measured kernels, torch.compile) is counted
apart. Nets, data, optimisers and learning rates are those of `experiments/tasks`; bfloat16 is autocast with float32
parameters.
"""

from __future__ import annotations

import copy
import datetime
import inspect
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import twofour
from cases.training import BOTH, COMPILED, CONTROL, EAGER, KEPT, TYPES
from twofour import measure
from twofour.errors import DataError, MeasureError
from twofour.measure import Record, Timing
from twofour.progress import Progress
from twofour.training import both_ways, sdgp

DENSE, MASKED, SPARSE_GRADIENT = "dense", "2:4", "2:4, SDGP"
ARMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cifar10": {
        DENSE: (EAGER, COMPILED),
        MASKED: (EAGER, COMPILED),
        BOTH: (EAGER,),
        SPARSE_GRADIENT: (EAGER, COMPILED),
    },
    "stsb": {DENSE: (EAGER, CONTROL), KEPT: (EAGER,), SPARSE_GRADIENT: (EAGER,)},
}
"""Tasks -> their arms, each with the ways in which it is tried. No convolution is packed to kept values alone."""
TRIAL = 3
"""Batches of the trial: once untimed, then twice timed."""
SLICE = 10
"""Steps that an arm makes before it is another one's turn."""


def cells(
    tasks: Sequence[str], dtypes: Sequence[str], epochs: int, examples: Mapping[str, int]
) -> list[dict[str, object]]:
    """List the cells: one a task and type, one thread; `examples` of an epoch by task.

    Raises:
        DataError: A task or type is not known.
    """
    for kind, names, known in (("task", tasks, ARMS), ("dtype", dtypes, TYPES)):
        if unknown := [name for name in names if name not in known]:
            raise DataError(f"the {kind} {unknown[0]!r} is not known", got=unknown[0], wanted=", ".join(known))
    facts = {"case": "repetition", "epochs": epochs, "threads": 1}
    return [
        {**facts, "model": task, "dtype": dtype, "examples": examples[task], "geometry": f"{epochs} x {examples[task]}"}
        for task in tasks
        for dtype in dtypes
    ]


class Trainee:
    """One arm in one way: a model of its own, its optimiser and what is attached.

    Args:
        task: A task of `experiments/tasks`.
        model: The arm's model, pruned where it is a sparse one.
        arm: "dense" or a sparse one.
        way: As in `ARMS`.
        dtype: Of the computation.
        example: The first batch's input: kernels are measured at its size.
        steps: Of the whole training, for the learning rate.
    """

    def __init__(
        self, task: Any, model: nn.Module, arm: str, way: str, dtype: torch.dtype, example: Any, steps: int
    ) -> None:
        from tasks.base import one_cycle

        self.task, self.arm, self.way, self.dtype = task, arm, way, dtype
        self.model = model.train()
        self.handle: Any = None
        with self.autocast():
            if arm in (BOTH, KEPT):
                state = "packed" if arm == KEPT else "dense"
                self.handle = both_ways.attach(model, example, state=state, **_rules(task))
            elif arm == SPARSE_GRADIENT:
                self.handle = sdgp.attach(model, "2:4", skip=task.skip)
            elif way == CONTROL:
                self.handle = both_ways.attach(model, example, kernels="dense", **_rules(task))
        self.run: Callable[..., Tensor] = self.model
        if way == COMPILED:
            # Batches of sentences differ in length: one program for all of them.
            self.run = torch.compile(self.model, dynamic=True if isinstance(example, tuple) else None)
        self.optimizer = fused(task.optimizer(list(self.model.parameters())))
        self.rate = one_cycle(self.optimizer, steps)

    def autocast(self) -> AbstractContextManager[Any]:
        """What the forward pass runs in."""
        return torch.autocast("cpu", self.dtype) if self.dtype is not torch.float32 else nullcontext()

    def gradients(self, batch: tuple[Any, Any]) -> None:
        """Run forward and backward pass."""
        x, target = batch
        with self.autocast():
            output = self.run(*x) if isinstance(x, tuple) else self.run(x)
        self.task.loss(output.float(), target).backward()

    def step(self, batch: tuple[Any, Any]) -> None:
        """Run a whole step."""
        self.gradients(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rate.step()

    def tried(self, batches: Sequence[tuple[Any, Any]]) -> float:
        """Return the seconds of forward and backward pass of some batches; the model stays as it is."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        torch.manual_seed(0)
        begin = time.perf_counter()
        for batch in batches:
            self.gradients(batch)
            self.optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        return seconds

    def finished(self) -> float:
        """Take off what is attached; return the metric on held-out data.

        Raises:
            MeasureError: The weights of a sparse arm are not 2:4.
        """
        if self.handle is not None:
            self.handle.finish()
        if self.arm != DENSE and not (report := twofour.check(self.model)).ok:
            raise MeasureError(f"the weights of the arm {self.arm!r} are not 2:4", got=str(report))
        with torch.inference_mode():
            return self.task.evaluate(self.model.eval())


def fused(made: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the same optimiser with torch's fused step."""
    kind = type(made)
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in made.defaults.items() if name in known}
    parameters = [parameter for group in made.param_groups for parameter in group["params"]]
    return cast(Any, kind)(parameters, **{**options, "fused": True})


def _rules(task: Any) -> dict[str, Any]:
    return {"skip": task.skip, "eligibility": task.eligibility}


class Bench:
    """Measures cells.

    Args:
        without: Arms, or ways of them, to leave out.
        criterion: That sparse arms are pruned by; "auto" is what `twofour.prune` chooses.
    """

    def __init__(self, without: Sequence[str] = (), criterion: str = "auto") -> None:
        self.without, self.criterion = without, criterion

    def __call__(self, cell: dict[str, object]) -> Record:
        """Train every arm of one cell."""
        torch.set_num_threads(1)
        task, dtype = task_of(str(cell["model"])), TYPES[str(cell["dtype"])]
        epochs, wanted = int(str(cell["epochs"])), int(str(cell["examples"]))
        loader = first(task.loader(0), wanted)
        torch.manual_seed(0)
        beginning = list(itertools.islice(loader, TRIAL))
        if not beginning:
            raise DataError(
                "no batch fits into the examples",
                got=str(wanted),
                wanted=f"at least {loader.batch}",
                remedy="take more",
            )
        with Progress() as shown:
            arms, found = self._arms(task, str(cell["model"]), dtype, beginning, epochs * len(loader), shown)
            slices, data = trained(arms, loader, epochs, shown)
            shown.begin("judging the arms", len(arms))
            metrics = {}
            for name, arm in arms.items():
                shown.say(name)
                metrics[name] = arm.finished()
                shown.advance()
        metric = task.metric
        facts = {
            "examples_trained": len(loader) * loader.batch,
            "steps": len(loader),
            "seconds": {name: (sum(seconds for seconds, _ in taken) + data) / epochs for name, taken in slices.items()},
            "data": data / epochs,
            "metric": metrics,
            "metric_name": metric.name,
            "criterion": self.criterion,
            "held_out": f"{metric.held_out} {metric.of}",
            "ways": {name: arm.way for name, arm in arms.items()},
            "plans": {name: str(arm.handle.plan) for name, arm in arms.items() if arm.handle is not None},
            "slice_ratios": {name: quartiles(slices[DENSE], taken) for name, taken in slices.items() if name != DENSE},
        }
        return Record(
            {name: timing(taken) for name, taken in slices.items()},
            baseline=(DENSE,),
            meta={**cell, **found, **facts},
            machine=measure.machine(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        )

    def _start(self, task: Any, arm: str) -> nn.Module:
        """Return the net that an arm trains again."""
        model: nn.Module = task.network(0)
        if arm != DENSE:
            pattern = "2:4-transposable" if arm in (BOTH, KEPT) else "2:4"
            data = None if self.criterion == "magnitude" else task.calibration()
            twofour.prune(model.eval(), pattern, criterion=self.criterion, data=data, progress=False, **_rules(task))
        return model

    def _arms(
        self,
        task: Any,
        name: str,
        dtype: torch.dtype,
        batches: Sequence[tuple[Any, Any]],
        steps: int,
        shown: Progress,
    ) -> tuple[dict[str, Trainee], dict[str, object]]:
        """Return the fastest way of each arm, and what the trial found."""
        made: dict[tuple[str, str], Trainee] = {}
        setup: dict[str, dict[str, float]] = {}
        missing: dict[str, str] = {}
        done = 0
        shown.begin(f"{name}: building and trying the arms", sum(map(len, ARMS[name].values())))
        for arm, ways in ARMS[name].items():
            wanted = [way for way in ways if arm not in self.without and way not in self.without]
            begin = time.perf_counter()
            shown.say(f"{arm}: pruning")
            start = self._start(task, arm) if wanted else None
            pruning = time.perf_counter() - begin
            for way in wanted:
                shown.say(f"{arm}: {way}")
                begin = time.perf_counter()
                try:
                    trainee = Trainee(task, copy.deepcopy(start), arm, way, dtype, batches[0][0], steps)
                    trainee.tried(batches)
                except Exception as error:  # a way that cannot is a finding, not an end of the run
                    missing[f"{arm}: {way}"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    continue
                made[arm, way] = trainee
                setup.setdefault(arm, {})[way] = pruning + time.perf_counter() - begin
            done += len(ways)
            shown.move(done)
        if DENSE not in setup:
            raise MeasureError("there is no dense arm to compare with", got=str(missing), wanted="one way of it")
        samples: dict[tuple[str, str], list[float]] = {key: [] for key in made}
        for keys in (list(made), list(made)[::-1]):
            for key in keys:
                samples[key].append(made[key].tried(batches))
        trial = {arm: {way: min(samples[arm, way]) / len(batches) for way in ways} for arm, ways in setup.items()}
        best = {arm: min(ways, key=ways.__getitem__) for arm, ways in trial.items()}
        found: dict[str, object] = {"trial": trial, "setup": setup, "missing": missing}
        return {arm: made[arm, way] for arm, way in best.items()}, found


def task_of(name: str) -> Any:
    """Return a task of `experiments/tasks`."""
    place = str(Path(__file__).resolve().parents[2] / "experiments")
    if place not in sys.path:
        sys.path.append(place)
    from tasks import TASKS

    return TASKS[name]()


def first(loader: Any, examples: int) -> Any:
    """Return batches of the first examples alone."""
    from tasks.base import Batches

    size = min(loader.size, examples)
    return Batches(size, loader.batch, loader.make, None if loader.lengths is None else loader.lengths[:size])


Taken = list[tuple[float, int]]
"""Seconds and steps of each slice."""


def trained(arms: Mapping[str, Trainee], loader: Any, epochs: int, shown: Progress) -> tuple[dict[str, Taken], float]:
    """Train every arm; return its slices, and the seconds that making batches took, which all of them share."""
    shown.begin("training every arm in turns, steps", epochs * len(loader) * len(arms))
    taken: dict[str, Taken] = {name: [] for name in arms}
    data, names = 0.0, list(arms)
    for epoch in range(epochs):
        torch.manual_seed(epoch)
        batches: Iterator[tuple[Any, Any]] = iter(loader)
        for number in itertools.count():
            begin = time.perf_counter()
            part = list(itertools.islice(batches, SLICE))
            data += time.perf_counter() - begin
            if not part:
                break
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                shown.say(name)
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(epoch * 1_000_003 + number)  # the same dropout in each arm
                    begin = time.perf_counter()
                    for batch in part:
                        arms[name].step(batch)
                    taken[name].append((time.perf_counter() - begin, len(part)))
                shown.move(sum(steps for slices in taken.values() for _, steps in slices))
    return taken, data


def timing(taken: Taken) -> Timing:
    """Return seconds a step over the slices, without the batches' making."""
    samples = [seconds / steps for seconds, steps in taken]
    lower, upper = _outer(samples)
    return Timing(statistics.median(samples), lower, upper, min(samples), len(samples), SLICE)


def quartiles(dense: Taken, sparse: Taken) -> list[float]:
    """Return lower quartile, median and upper quartile of the dense slice's seconds over the sparse one's."""
    ratios = [one / other for (one, _), (other, _) in zip(dense, sparse, strict=True)]
    lower, upper = _outer(ratios)
    return [lower, statistics.median(ratios), upper]


def _outer(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper


HEADS = (
    "task, dtype, examples of an epoch",
    "arm, its way",
    "seconds an epoch",
    "dense / it",
    "slices",
    "before",
    "metric",
)


def lines(record: Record) -> list[list[str]]:
    """Return the rows of one record under `HEADS`."""
    meta = cast("Mapping[str, Any]", record.meta)
    seconds, setup = meta["seconds"], meta["setup"]
    rows: list[list[str]] = []
    for name, way in meta["ways"].items():
        ratios = meta["slice_ratios"].get(name)
        rows.append(
            [
                f"{meta['model']}, {meta['dtype']}, {meta['examples_trained']:,}",
                f"{name}, {way}",
                f"{seconds[name]:.1f}",
                f"{seconds[DENSE] / seconds[name]:.3f}",
                "" if ratios is None else "{1:.3f} ({0:.3f} to {2:.3f})".format(*ratios),
                f"{setup[name][way]:.1f} s",
                f"{meta['metric'][name]:.2f}",
            ]
        )
    return rows


def tried(record: Record) -> str:
    """Say what the trial of the ways found, and what was not there."""
    meta = cast("Mapping[str, Any]", record.meta)
    ways = (f"{arm}: {way} {s * 1e3:.0f} ms" for arm, found in meta["trial"].items() for way, s in found.items())
    lost = (f"not built: {name}: {why}" for name, why in meta["missing"].items())
    return "; ".join((f"sparse arms pruned by {meta['criterion']}", *ways, *lost))


def show(found: Sequence[Record], console: Console) -> None:
    """Print every arm of every record, and the trial that chose its way."""
    for record in found:
        meta = cast("Mapping[str, Any]", record.meta)
        title = (
            f"repetition, {meta['epochs']} epochs of {meta['steps']} steps, {meta['metric_name']} of {meta['held_out']}"
        )
        table = Table(title=title, title_justify="left")
        for index, column in enumerate(HEADS):
            table.add_column(column, justify="right" if index > 1 else "left")
        for row in lines(record):
            table.add_row(*row)
        console.print(table)
        console.print(f"forward and backward pass of the first batches: {tried(record)}", highlight=False)
