"""Two checkouts of twofour, case by case: what became slower or faster between them, and what the machine alone does.

    python benchmarks/versions.py --rounds 3 ../before . linear --dtype float32,int8 --threads 1 --hot

What follows the two checkouts is for the `benchmarks/run.py` of each, which runs with that checkout's `.venv`. They
take turns, a process each time, and every round is in the other order. A candidate's ratio in a cell is the median
over the rounds of new / old; dense code of others, which no version of ours changes, shows how far equal things differ.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
    """Return new / old of each cell and candidate that every round of both has: the median over the rounds."""
    common = set(old[0]).intersection(*old, *new)
    return {
        key: statistics.median(n[key] / o[key] for o, n in zip(old, new, strict=True))
        for key in sorted(common, key=str)
    }


def is_ours(candidate: str) -> bool:
    """Whether a candidate is code of ours; the others are the control."""
    theirs = candidate.endswith(("__torch", "__mkl", "__onednn"))
    return candidate == COMPILED or candidate.startswith("twofour ") or ("__" in candidate and not theirs)


def show(found: Mapping[tuple[object, ...], float], console: Console) -> None:
    """Print the geometric means of ours and of the control, and the cells that became slowest."""
    for title, chosen in (("ours", True), ("control", False)):
        part = {key: ratio for key, ratio in found.items() if is_ours(str(key[-1])) is chosen}
        if not part:
            console.print(f"{title}: no cell that both have")
            continue
        spread = f"{min(part.values()):.3f} to {max(part.values()):.3f}"
        console.print(f"{title}: new / old {geometric_mean(part.values()):.3f} over {len(part)} cells, {spread}")
        table = Table(box=None, pad_edge=False)
        for column in ("new / old", "cell", "candidate"):
            table.add_column(column)
        for row in _worst(part):
            table.add_row(*row)
        console.print(table)


def _worst(part: Mapping[tuple[object, ...], float]) -> Iterator[tuple[str, str, str]]:
    for key in sorted(part, key=lambda key: -part[key])[:WORST]:
        yield f"{part[key]:.3f}", " ".join(str(word) for word in key[:-1] if word != "None"), str(key[-1])


if __name__ == "__main__":
    app()
