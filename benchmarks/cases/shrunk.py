"""Shrunk models: a share of the compiled time, then 2:4, against OpenVINO with the whole model, on one thread.

Time asks for no trained weights: channels go by magnitude. What is promised is what `shrink` measured while it chose;
what is kept of it is measured anew, the small model compiled beside the large one. Each model's answer is held to
torch's for the same weights before anything is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from torch import nn

import twofour
from cases import models
from cases.columns import headed
from cases.models import DENSE, OPENVINO, Builders, Side, compiled
from cases.records import machine_line
from models import BUILDERS, Subject
from twofour import engines, shrinking
from twofour.errors import DataError
from twofour.measure import Record
from twofour.shrinking import Budget

SHRUNK, SPARSE = "twofour shrunk", "twofour shrunk, 2:4"


def cells(names: Sequence[str], budgets: Sequence[float]) -> list[dict[str, object]]:
    """List the cells.

    Raises:
        DataError: There is no such model.
    """
    if unknown := [name for name in names if name not in BUILDERS]:
        raise DataError(f"there is no model {unknown[0]!r}", got=unknown[0], wanted=f"one of {', '.join(BUILDERS)}")
    facts = {"case": "shrunk", "dtype": "float32", "batch": 1, "threads": 1}
    return [{**facts, "model": name, "budget": budget} for name in names for budget in budgets]


class Bench(models.Bench):
    """Measures cells; a model is shrunk anew for each budget."""

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        self.budget, self.at = float(str(cell["budget"])), ()
        torch.set_num_threads(1)
        return super().__call__(cell)

    def prune(self, subject: Subject) -> nn.Module:
        """Return the small model, 2:4."""
        small = twofour.shrink(subject.model, subject.inputs, Budget(time=self.budget), progress=False)
        self.small = replace(subject, model=small.eval().requires_grad_(False))
        return super().prune(self.small)

    def build(self, subject: Subject, pruned: Subject, dtype: str, threads: int) -> Side:
        """Build what is timed."""
        side = Side()
        whole, small, sparse = (
            engines.values_of(engines.eager(entry, "float32", threads)()) for entry in (subject, self.small, pruned)
        )
        builders: Builders = {
            OPENVINO: (partial(engines.openvino, subject, dtype, threads), whole),
            DENSE: (partial(compiled, side, DENSE, subject, dtype), whole),
            SHRUNK: (partial(compiled, side, SHRUNK, self.small, dtype), small),
            SPARSE: (partial(compiled, side, SPARSE, pruned, dtype), sparse),
        }
        self.add(side, builders, dtype)
        return side

    def facts(self, subject: Subject, side: Side) -> dict[str, object]:
        """Return what was promised, and the sizes."""
        report = shrinking.report_of(self.small.model)
        assert report is not None and report.milliseconds is not None
        before, after = report.milliseconds
        widths = {width.name: [width.before, width.after] for width in report.widths}
        sizes = {"parameters": list(report.parameters), "macs": list(report.macs)}
        return {"promised": after / before, "timing": report.timing, "widths": widths, **sizes}


HEADS = (*(f"{name} ms" for name in (OPENVINO, DENSE, SHRUNK, SPARSE)), "promised", "measured", "2:4 over OpenVINO")


def line(record: Record) -> list[str]:
    """Return model and budget, and under `HEADS` milliseconds, the promised share and the measured ones."""
    ms = [
        f"{1e3 * record.median(name):.3f}" if name in record.timings else "-"
        for name in (OPENVINO, DENSE, SHRUNK, SPARSE)
    ]
    told = [
        f"{record.median(a) / record.median(b):.3f}" if {a, b} <= record.timings.keys() else "-"
        for a, b in ((SHRUNK, DENSE), (SPARSE, OPENVINO))
    ]
    return [f"{record.meta['model']}, {record.meta['budget']}", *ms, f"{record.meta['promised']:.3f}", *told]


def show(records: Sequence[Record], console: Console) -> None:
    """Print a line per model and budget."""
    table = headed(("model, budget", *HEADS))
    for record in records:
        table.add_row(*line(record))
    console.print(table)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)
