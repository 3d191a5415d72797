"""Two checkouts of twofour, case by case: what became slower or faster between them, and what the machine alone does.

    python benchmarks/versions.py --rounds 3 ../before . linear --dtype float32,int8 --threads 1 --hot

What follows the two checkouts is for the `benchmarks/run.py` of each, which runs with that checkout's `.venv`. They
take turns, a process each time, and every round is in the other order. A candidate's time in a cell is the least of its
rounds' medians, since other processes only add. The control is dense code of others in the same cell, which no version
of ours changes.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cases import records
from cases.grid import COMPILED
from twofour import measure
from twofour.errors import MeasureError
from twofour.measure import geometric_mean

Seconds = dict[tuple[object, ...], float]
"""Cell and candidate -> median seconds."""

WORST = 8
"""Cells of a table of the slowest."""


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def versions(
    old: Annotated[Path, typer.Argument(help="A checkout.", exists=True)],
    new: Annotated[Path, typer.Argument(help="The other.", exists=True)],
    suite: Annotated[list[str], typer.Argument(help="A part of run.py with its options.")],
    rounds: Annotated[int, typer.Option(help="Times that each checkout runs.")] = 3,
) -> None:
    """Run a part of the suite in two checkouts by turns, and compare them."""
    sides: tuple[list[Seconds], list[Seconds]] = [], []
    turn = list(zip((old.resolve(), new.resolve()), sides, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for checkout, found in turn:
                found.append(run(checkout, suite, Path(tempfile.mkdtemp(dir=folder))))
            turn.reverse()
    show(ratios(*sides), Console(width=160))


def run(checkout: Path, suite: Sequence[str], folder: Path) -> Seconds:
    """Run the suite of a checkout and return its times.

    Raises:
        MeasureError: It failed.
    """
    command = [str(checkout / ".venv/bin/python"), "benchmarks/run.py", *suite, "--json", str(folder)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise MeasureError(
            f"the suite of {checkout} failed",
            got=done.stderr.strip()[-2000:],
            wanted=f"exit code 0 of {' '.join(suite)}",
        )
    return {
        (*records.key(dict(record.meta)), name): timing.median
        for file in sorted(folder.glob("*.json"))
        for record in measure.load(file)
        for name, timing in record.timings.items()
    }


def ratios(old: Sequence[Seconds], new: Sequence[Seconds]) -> dict[tuple[object, ...], float]:
    """Return new / old of each cell and candidate that every round of both has, each the least over its rounds."""
    common = set(old[0]).intersection(*old, *new)
    return {
        key: min(seconds[key] for seconds in new) / min(seconds[key] for seconds in old)
        for key in sorted(common, key=str)
    }


def is_ours(candidate: str) -> bool:
    """Whether a candidate is code of ours; the others are the control."""
    theirs = candidate.endswith(("__torch", "__mkl", "__onednn"))
    return candidate == COMPILED or candidate.startswith("twofour ") or ("__" in candidate and not theirs)


def beside_control(found: Mapping[tuple[object, ...], float]) -> dict[tuple[object, ...], float]:
    """Return the ratios of ours over that of the control in the same cell: what the machine did there is taken out."""
    control: dict[tuple[object, ...], list[float]] = {}
    for (*cell, candidate), ratio in found.items():
        if not is_ours(str(candidate)):
            control.setdefault(tuple(cell), []).append(ratio)
    return {
        key: ratio / geometric_mean(control[key[:-1]])
        for key, ratio in found.items()
        if is_ours(str(key[-1])) and key[:-1] in control
    }


def show(found: Mapping[tuple[object, ...], float], console: Console) -> None:
    """Print geometric means: of ours, of the control, of ours over the control by candidate; and the slowest cells."""
    ours = {key: ratio for key, ratio in found.items() if is_ours(str(key[-1]))}
    control = {key: ratio for key, ratio in found.items() if key not in ours}
    beside = beside_control(found)
    for title, part in (("ours", ours), ("control", control), ("ours over the control of the cell", beside)):
        console.print(f"{title}: {_summary(part)}", highlight=False)
    by_candidate: dict[str, list[float]] = {}
    for key, ratio in beside.items():
        by_candidate.setdefault(str(key[-1]), []).append(ratio)
    table = Table("new / old over control", "cells", "candidate", box=None, pad_edge=False)
    for name, ratios_of in sorted(by_candidate.items(), key=lambda item: -geometric_mean(item[1])):
        table.add_row(f"{geometric_mean(ratios_of):.3f}", str(len(ratios_of)), name)
    console.print(table)
    table = Table("new / old over control", "cell", "candidate", box=None, pad_edge=False)
    for key in sorted(beside, key=lambda key: -beside[key])[:WORST]:
        table.add_row(f"{beside[key]:.3f}", " ".join(str(word) for word in key[:-1] if word != "None"), str(key[-1]))
    console.print(table)


def _summary(part: Mapping[tuple[object, ...], float]) -> str:
    if not part:
        return "no cell that both have"
    spread = f"{min(part.values()):.3f} to {max(part.values()):.3f}"
    return f"new / old {geometric_mean(part.values()):.3f} over {len(part)} cells, {spread}"


if __name__ == "__main__":
    app()
