"""Algebra: blocks that have fewer products in them than they are written with, in every runtime, on one thread.

As the case `models`, dense alone: `compile` with rules="exact", which is its default, and with rules="close", against
torch, Inductor with freezing, ONNX Runtime and OpenVINO on the same module. What was rewritten stands in the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from rich.console import Console

from cases.columns import headed, milliseconds, show_missing
from cases.models import EAGER, INDUCTOR, OPENVINO, ORT, Bench, Builders, Side, compiled
from cases.records import machine_line
from models import Subject
from models.algebra import ALGEBRA
from twofour import engines
from twofour.errors import DataError
from twofour.measure import Record, geometric_mean

EXACT, CLOSE = "twofour exact", "twofour close"
OTHERS = (EAGER, INDUCTOR, ORT, OPENVINO)


def cells(blocks: Sequence[str]) -> list[dict[str, object]]:
    """List the cells.

    Raises:
        DataError: There is no such block.
    """
    for name in blocks:
        if name not in ALGEBRA:
            raise DataError(f"there is no block {name!r}", got=name, wanted=f"one of {', '.join(ALGEBRA)}")
    return [{"case": "algebra", "model": name, "dtype": "float32", "batch": 1, "threads": 1} for name in blocks]


class AlgebraBench(Bench):
    """Measures cells: nothing is pruned."""

    def __init__(self, seconds: float, without: Sequence[str] = ()) -> None:
        super().__init__(seconds, without)
        self.builders = {name: lambda _, build=build: build() for name, build in ALGEBRA.items()}

    def prune(self, subject: Subject) -> torch.nn.Module:
        """Return the model as it is."""
        return subject.model

    def build(self, subject: Subject, pruned: Subject, dtype: str, threads: int) -> Side:
        """Build what is timed."""
        side = Side()
        reference = engines.values_of(engines.eager(subject, "float32", threads)())
        builders: Builders = {
            EAGER: (partial(engines.eager, subject, dtype, threads), reference),
            INDUCTOR: (partial(engines.inductor, subject, dtype, threads), reference),
            ORT: (partial(engines.onnxruntime, subject, dtype, threads), reference),
            OPENVINO: (partial(engines.openvino, subject, dtype, threads), reference),
            EXACT: (partial(compiled, side, EXACT, subject, dtype), reference),
            CLOSE: (partial(compiled, side, CLOSE, subject, dtype, rules="close"), reference),
        }
        self.add(side, builders, dtype)
        return side

    def facts(self, subject: Subject, side: Side) -> dict[str, object]:
        """Return what the rules did."""
        return {
            "rewrites": {name: dict(found.rewrites) for name, found in side.accounts.items() if found},
            "not_rewritten": {name: list(found.not_rewritten) for name, found in side.accounts.items() if found},
        }


def show(records: Sequence[Record], console: Console) -> None:
    """Print milliseconds of each block, then how many times as long each other runtime takes."""
    table = headed(("milliseconds per call, medians", *OTHERS, EXACT, CLOSE))
    for record in records:
        table.add_row(str(record.meta["model"]), *(milliseconds(record, name) for name in (*OTHERS, EXACT, CLOSE)))
    console.print(table)
    for ours in (EXACT, CLOSE):
        for other in OTHERS:
            found = [r.median(other) / r.median(ours) for r in records if {other, ours} <= set(r.timings)]
            if found:
                mean = geometric_mean(found)
                console.print(f"{other} / {ours}: geometric mean {mean:.2f}, least {min(found):.2f}", highlight=False)
    show_missing(records, lambda record: str(record.meta["model"]), console)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)
