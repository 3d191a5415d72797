"""`run.py dial NAME`: rows of accuracy, the layers' times, the mixed recipes they pay for, the models' times."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import nn

import dial as dials
import dial_times
from arms import DENSE
from records import Clocked, Records, Turned
from tasks import TASKS, Task

STAGES = ("accuracy", "layers", "mixed", "times")
console = Console(stderr=True)


def add(app: typer.Typer, dense_model: Callable[[Task, int], nn.Module]) -> None:
    """Add the command to the command line.

    Args:
        app: Of the experiments.
        dense_model: Returns a task's converged dense model of a seed.
    """

    @app.command()
    def dial(
        name: Annotated[str, typer.Argument(help=", ".join(dials.DIALS))],
        stage: Annotated[str, typer.Option(help=f"{', '.join(STAGES)}, or all.")] = "all",
        only: Annotated[str, typer.Option(help="Globs of rows, comma separated: 'dense,auto*'.")] = "*",
        compile_only: Annotated[bool, typer.Option("--compile-only", help="Choose kernels, time no model.")] = False,
        record: Annotated[bool, typer.Option("--record", help="Keep the rows in experiments/records, in git.")] = False,
    ) -> None:
        """Prune once to 2:4, to dense groups and to mixed recipes; "layers" and "times" want a quiet machine."""
        if name not in dials.DIALS or stage not in (*STAGES, "all"):
            raise typer.BadParameter(
                f"{name!r}, stage {stage!r}: dials are {', '.join(dials.DIALS)}; stages {', '.join(STAGES)}, all"
            )
        torch.set_num_threads(1)
        turned = Turning(name, only.split(","), record, dense_model)
        steps = {
            "accuracy": turned.accuracy,
            "layers": turned.layers,
            "mixed": turned.mixed,
            "times": lambda: turned.times(compile_only),
        }
        for step in STAGES if stage == "all" else (stage,):
            for said in steps[step]():
                console.print(f"{name}: {said}", highlight=False)


class Turning:
    """One dial and its records.

    Args:
        name: Of the dial and its task.
        only: Globs of rows.
        record: Keep the rows in git.
        dense_model: Returns a task's dense model of a seed.
    """

    def __init__(self, name: str, only: list[str], record: bool, dense_model: Callable[[Task, int], nn.Module]) -> None:
        self.dial, self.task, self.only = dials.DIALS[name], TASKS[name](), only
        self.fresh = lambda: dense_model(self.task, 0)
        metric = asdict(self.task.metric)
        self.rows = Records(f"dial-{name}", metric, record, Turned)
        self.clocked = Records(f"dial-{name}-times", {"timed_on": self.dial.timed_on}, record, Clocked)

    def accuracy(self) -> Iterator[str]:
        """Measure dense and each pattern everywhere, by each criterion, and what each layer loses."""
        if self._missing(DENSE):
            yield self._add("", DENSE)
        for criterion in self.dial.criteria:
            for pattern in dials.PATTERNS:
                if self._missing(dials.key(criterion, pattern)):
                    yield self._add(criterion, pattern)
        for criterion in self._curves():
            found = dials.sensitivities(self.task, self.fresh().eval(), criterion)
            yield f"{criterion}: the losses of {len(found.layers)} layers are known"

    def layers(self) -> Iterator[str]:
        """Time each layer with each pattern."""
        for criterion in self._curves():
            found = dials.with_times(self.dial, self.task, self.fresh().eval(), criterion)
            low, high = (dials.uniform(found, pattern).latency for pattern in (dials.TWO_FOUR, DENSE))
            yield f"{criterion}: the layers take {low:.3f} ms at 2:4 and {high:.3f} dense"

    def mixed(self) -> Iterator[str]:
        """Measure the recipes that budgets of milliseconds choose."""
        for criterion in self._curves():
            for share in dials.SHARES:
                if self._missing(dials.key(criterion, dials.mixed(share))):
                    found = dials.sensitivities(self.task, self.fresh().eval(), criterion)
                    if not found.timing:
                        raise typer.BadParameter(f"{criterion}: the layers have no times yet: --stage layers first")
                    yield self._add(criterion, dials.mixed(share), dials.recipe(found, share))

    def times(self, compile_only: bool) -> Iterator[str]:
        """Time the models of the rows against each other, all in one run, or only choose their kernels."""
        rows = [row for row in self.rows.rows.values() if self._asked(row.key)]
        if compile_only:
            for row in rows:
                dial_times.compiled(self.dial, self.task, self.fresh, row)
                yield f"{row.key}: compiled"
            return
        found = dial_times.timed(self.dial, self.task, self.fresh, rows)
        self.clocked.replace(found)  # times of two runs were not taken in turns
        for clocked in found:
            yield f"{clocked.key}: {clocked.ms:.3f} ms ({clocked.lower:.3f} to {clocked.upper:.3f})"

    def _add(self, criterion: str, pattern: str, chosen: dict[str, str] | None = None) -> str:
        row = dials.measured(self.task, self.fresh, criterion, pattern, chosen)
        self.rows.add(row)
        return f"{row.key}: {row.value:.3f}, {row.away:.4f} away from dense, {row.seconds:.0f} s"

    def _curves(self) -> list[str]:
        """The criteria of which rows are asked for."""
        return [name for name in self.dial.criteria if self._asked(dials.key(name, dials.mixed(dials.SHARES[0])))]

    def _asked(self, key: str) -> bool:
        return any(fnmatch.fnmatch(key, glob) for glob in self.only)

    def _missing(self, key: str) -> bool:
        return self._asked(key) and (key, 0) not in self.rows.rows
